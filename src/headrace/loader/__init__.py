"""The drop-in loader on recycled shared memory; see ``headrace.loader.loader.Loader``."""
