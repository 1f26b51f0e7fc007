"""One group of four worker processes for the whole session: starting one costs seconds of imports, so tests share it.

    results = group.run(2, jobs.some_function, argument)   # on ranks 0 and 1; the list of what each returned

A job sees the environment that torchrun would give it and may initialise and destroy process groups as it likes.
"""

import os
import socket
import sys
import traceback
from pathlib import Path

import pytest
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"  # before the workers import torch; several of them share few cores
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the suite's numbers are those of CPUs

WORLD = 4
PATIENCE_SECONDS = 300  # a job that takes longer hangs


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, connection, log: str) -> None:
    """A worker's life: run what is sent until None is sent."""
    mp.current_process()._config["daemon"] = False  # it ends with the session, but may start loader workers itself
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    while (message := connection.recv()) is not None:
        function, arguments, environment = message
        for name, value in environment.items():
            os.environ[name] = value
        for name in ("LT_PRECISION", "LT_ACCELERATOR"):
            os.environ.pop(name, None)
        try:
            connection.send((True, function(*arguments)))
        except BaseException:  # SystemExit too: its code and traceback belong to the test
            connection.send((False, traceback.format_exc()))


class Group:
    def __init__(self, folder: Path, world: int = WORLD) -> None:
        context = mp.get_context("spawn")
        self.logs = [folder / f"rank{rank}.log" for rank in range(world)]
        self.connections, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there, str(self.logs[rank])), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, ranks: int, function, *arguments) -> list:
        """Run function(*arguments) on the first `ranks` workers together; raise if one of them does."""
        port = str(free_port())
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "tests",  # Lightning takes it for torchrun's doing
            }
            self.connections[rank].send((function, arguments, environment))
        answers, failed = [], None
        for rank in range(ranks):
            if not self.connections[rank].poll(PATIENCE_SECONDS if failed is None else 20):
                self.stop(kill=True)
                raise TimeoutError(f"rank {rank} of {ranks} hangs in {function.__name__}; first failure:\n{failed}")
            ok, value = self.connections[rank].recv()
            if not ok and failed is None:
                failed = f"rank {rank} of {ranks}:\n{value}"
            answers.append(value)
        if failed:
            raise AssertionError(failed)
        return answers

    def stop(self, kill: bool = False) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                connection.send(None)
        for process in self.processes:
            process.join(30)


@pytest.fixture(scope="session")
def group(tmp_path_factory):
    group = Group(tmp_path_factory.mktemp("workers"))
    yield group
    group.stop()
    assert [process.exitcode for process in group.processes] == [0] * WORLD


@pytest.fixture(scope="session")
def forker(tmp_path_factory):
    """One process that runs nothing itself, so that it has no threads: to fork runs from."""
    group = Group(tmp_path_factory.mktemp("forker"), world=1)
    yield group
    group.stop()
    assert [process.exitcode for process in group.processes] == [0]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A small token folder: 40 documents of seeded words, train and held out."""
    import random

    from data import ByteTokenizer, prepare_documents

    rng = random.Random(0)
    words = ["llama", "grass", "andes", "wool", "walks", "over", "the", "high", "plain", "\n", "and", "rests"]
    documents = [" ".join(rng.choices(words, k=rng.randrange(20, 120))) for _ in range(40)]
    # 2% of documents are held out by their digest: enough more of them that some are
    documents += [f"llama number {i} eats grass" for i in range(200)]
    return prepare_documents(documents, tmp_path_factory.mktemp("data") / "words", ByteTokenizer())
