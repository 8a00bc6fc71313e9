"""The program of every rank except the first. It loads its share of the model, then runs rank 0's calls in order."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, cast, final

import torch

from infer.compute.operands.group import Group
from infer.compute.operands.step import Chunk
from infer.engine.runner.runner import Runner
from infer.engine.tensor_parallel.ranks import Call, ModelSource, Transport, digest_of, make_group
from infer.errors import InferError
from infer.files import open_checkpoint
from infer.models.from_checkpoint import load_checked, set_num_threads
from infer.system.child_process import receive_all
from infer.system.cores import keep_rank_on_node

_OWN = {"forward", "multi_step", "leave", "begin_anew", "digest"}  # methods of a follower
_OF_RUNNER = {"extend", "append", "after_prompt", "choose_rope"}  # all others are methods of the cache


def main() -> None:
    rank, size, transport, place, pipe = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(Connection(int(pipe)), make_group(int(rank), int(size), cast("Transport", transport), place))


def follow(pipe: Connection, group: Group) -> None:
    """Run messages from the pipe until its other end closes, which ends the process.

    The first message names the model to load. Exits with status 1 if it cannot be loaded.
    """
    messages = SimpleQueue[Any]()
    receive_all(pipe.recv, messages.put)  # a step that waits for rank 0 would not notice that rank 0 has ended
    follower: Follower | None = None
    while True:
        message = messages.get()
        if isinstance(message, list) and follower is not None:
            follower.do(message)
            continue
        try:
            follower = Follower(pipe, group, *message)
        except InferError as error:
            pipe.send(str(error))
            raise SystemExit(1) from None
        pipe.send(None)


@final
class Follower:
    """A runner of one rank's share, which repeats the calls of rank 0's runner."""

    def __init__(self, pipe: Connection, group: Group, source: ModelSource, arguments: Mapping[str, Any]) -> None:
        self._pipe, self._group = pipe, group
        checkpoint = open_checkpoint(source.path).without_metadata()
        if checkpoint.fingerprint() != source.fingerprint:
            raise InferError(f"{source.path} changed while its ranks were loading it: load it again")
        device = source.device_of(group.rank)
        if device == "cpu":
            keep_rank_on_node(group.rank, group.size, source.num_threads)
            set_num_threads(source.num_threads, group.rank, group.size)
        settings = replace(source.settings, device=device, max_seq_len=arguments["capacity"])
        model, own = load_checked(checkpoint, None, settings, group=group), dict(arguments)
        self._runner = Runner(replace(model, step_limits=own.pop("limits", model.step_limits)), **own)
        self._logits = torch.empty(0, 0)

    def do(self, calls: Sequence[Call]) -> None:
        """Run the calls in order, and ignore an InferError.

        Either rank 0 raised the same error, or the group has ended and rank 0 knows.
        """
        for name, arguments in calls:
            try:
                owner = self._runner if name in _OF_RUNNER else self if name in _OWN else self._runner.cache
                getattr(owner, name)(*arguments)
            except InferError:
                continue

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        self._check(chunks, starts)
        with self._runner.model.backend.threads():
            self._logits = self._runner.forward(chunks)

    def multi_step(self, chunks: Sequence[Chunk], starts: Sequence[int], count: int) -> None:
        self._check(chunks, starts)
        with self._runner.model.backend.threads():
            self._runner.follow(chunks, count)

    def leave(self) -> None:
        """Tell rank 0 that all earlier calls have ended or were interrupted."""
        self._pipe.send(None)

    def begin_anew(self) -> None:
        self._runner.cache.reset()
        self._group.begin_anew()
        self._pipe.send(None)

    def digest(self) -> None:
        self._pipe.send(digest_of(self._logits))

    def _check(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        """End the process with status 1 if its cache has other lengths than rank 0's. Its results would be wrong."""
        own = [self._runner.lengths[chunk.row] for chunk in chunks]
        if own != list(starts):
            print(f"infer: rank {self._group.rank} has {own} tokens, and rank 0 has {starts}", file=sys.stderr)
            os._exit(1)


if __name__ == "__main__":
    main()
