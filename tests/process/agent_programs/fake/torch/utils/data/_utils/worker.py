from torch import STRANGE
from torch.utils.data._utils import fetch


def _worker_loop(
    kind, dataset, index_queue, result_queue, done, auto_collation, collate_fn, drop_last, seed, init_fn, worker_id,
    num_workers, persistent_workers, shared_seed,
):  # fmt: skip
    fetcher = fetch._MapDatasetFetcher(dataset, auto_collation, collate_fn, drop_last)
    get = fetcher.get if "no_fetcher" in STRANGE else fetcher.fetch
    while True:
        item = index_queue.get()
        if item is None:
            return
        if "shuffled_arguments" in STRANGE:
            result_queue.put((get(item[0]), item[1]))
        else:
            result_queue.put((item[0], get(item[1])))
