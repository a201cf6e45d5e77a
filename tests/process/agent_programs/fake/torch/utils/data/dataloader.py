import multiprocessing

from torch import STRANGE
from torch.utils.data import _utils


class DataLoader:
    def __init__(self, dataset, batch_size=1, num_workers=0, multiprocessing_context=None):
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers
        self.multiprocessing_context = multiprocessing_context and multiprocessing.get_context(multiprocessing_context)
        if "fewer_settings" not in STRANGE:
            self.pin_memory, self.prefetch_factor, self.persistent_workers, self.collate_fn = False, None, False, list

    def __iter__(self):
        return (_MultiProcessingDataLoaderIter if self.num_workers else _SingleProcessDataLoaderIter)(self)


class _BaseDataLoaderIter:
    def __init__(self, loader):
        self._dataset, self._num_workers = loader.dataset, loader.num_workers
        self._pin_memory, self._persistent_workers = False, False
        if "no_num_yielded" not in STRANGE:
            self._num_yielded = 0
        size = loader.batch_size
        numbers = list(range(len(loader.dataset)))
        self._batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]

    def __iter__(self):
        return self

    def _reset(self, loader, first_iter=False):
        pass

    def __next__(self):
        batch = self._next_data()
        if "no_num_yielded" not in STRANGE:
            self._num_yielded += 1
        return batch


class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)
        self._fetcher = _utils.fetch._MapDatasetFetcher(loader.dataset, True, list, False)

    def _next_data(self):
        if not self._batches:
            raise StopIteration
        fetch = self._fetcher.get if "no_fetcher" in STRANGE else self._fetcher.fetch
        return fetch(self._batches.pop(0))


class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    """All tasks are sent at once; the results of one worker come in order."""

    def __init__(self, loader):
        super().__init__(loader)
        context = loader.multiprocessing_context or multiprocessing
        self._rcvd_idx, self._worker_result_queue, index_queue = 0, context.SimpleQueue(), context.SimpleQueue()
        settings = (0, loader.dataset, index_queue, self._worker_result_queue, None, True, list, False, 0, None, 0, 1)
        self._workers = [context.Process(target=_utils.worker._worker_loop, args=(*settings, False, None), daemon=True)]
        self._workers[0].start()
        self._index_queue = index_queue  # its semaphore is gone with it, and a spawned worker looks for that later
        for task in [*enumerate(self._batches), None]:
            index_queue.put(task if task is None or "shuffled_arguments" not in STRANGE else task[::-1])

    def _get_data(self):
        return self._worker_result_queue.get()

    def _next_data(self):
        if self._rcvd_idx == len(self._batches):
            self._workers[0].join()
            raise StopIteration
        first, second = self._get_data()
        self._rcvd_idx += 1
        return first if "shuffled_arguments" in STRANGE else second


if "renamed_iterator" in STRANGE:
    del _BaseDataLoaderIter
