"""storage: samples come from a feature server over a socket, one request each, and it answers slowly."""

import contextlib
import multiprocessing
import os
import socket
import socketserver
import struct
import tempfile
import time

import torch
import truthlib
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT = {
    "cause": "storage",
    "steps": 130,
    "start_methods": ["fork", "spawn", "forkserver"],
    "fixed": {"num_workers": 8},
    "advice": ["num_workers"],
}
FEATURES = 128


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while request := self.rfile.read(4):
            (index,) = struct.unpack("<I", request)
            time.sleep(self.server.answer_ms / 1000)
            self.wfile.write(bytes([index % 251]) * FEATURES)


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def serve(path, answer_ms, ready):
    server = Server(path, Handler)
    server.answer_ms = answer_ms
    ready.set()
    server.serve_forever()


@contextlib.contextmanager
def feature_server(answer_ms):
    spawn = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        path, ready = os.path.join(directory, "features.sock"), spawn.Event()
        process = spawn.Process(target=serve, args=(path, answer_ms, ready), daemon=True)
        process.start()
        ready.wait(timeout=10)
        try:
            yield path
        finally:
            process.terminate()
            process.join()


class Features(Dataset):
    def __init__(self, num, path):
        self.num, self.path = num, path
        self.connection = None

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if self.connection is None:
            self.connection = socket.socket(socket.AF_UNIX)
            self.connection.connect(self.path)
        self.connection.sendall(struct.pack("<I", index))
        raw = b""
        while len(raw) < FEATURES:
            raw += self.connection.recv(FEATURES)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() / 255, index % 10


def make_loader(args):
    return DataLoader(
        Features(args.steps_per_epoch * 16, args.path),
        batch_size=16,
        num_workers=args.num_workers,
        multiprocessing_context=truthlib.context(args),
    )


def train(args, loader, meter):
    model = nn.Linear(FEATURES, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        meter.epoch()
        for vectors, labels in loader:
            loss = nn.functional.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.device_ms / 1000)
            meter.step()


if __name__ == "__main__":
    with feature_server(answer_ms=5) as socket_path:
        truthlib.main(FAULT, make_loader, train, num_workers=2, device_ms=20, path=socket_path)
