from torch import STRANGE


class _BaseDatasetFetcher:
    def __init__(self, dataset, auto_collation, collate_fn, drop_last):
        self.dataset, self.collate_fn = dataset, collate_fn
        if "no_auto_collation" not in STRANGE:
            self.auto_collation = auto_collation


class _MapDatasetFetcher(_BaseDatasetFetcher):
    def fetch(self, indices):
        return self.collate_fn([self.dataset[index] for index in indices])


class _IterableDatasetFetcher(_BaseDatasetFetcher):
    def fetch(self, indices):
        raise NotImplementedError


if "no_fetcher" in STRANGE:
    del _MapDatasetFetcher.fetch, _IterableDatasetFetcher.fetch
    _MapDatasetFetcher.get = lambda self, indices: self.collate_fn([self.dataset[index] for index in indices])
