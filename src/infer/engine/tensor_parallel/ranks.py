"""The other ranks of a model: processes that rank 0 starts, controls and ends.

Each rank receives its calls through a socket, all in the same order. It answers only when rank 0 waits for the answer.
When rank 0 ends, for any reason, the sockets close and the other ranks end too. A rank that dies ends the group: ranks
that wait in a gather stop waiting.
"""

import hashlib
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, distributed

from infer.compute import ops
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.group import Group
from infer.compute.operands.limits import HOST_STEP
from infer.errors import InferError, InvalidRequestError
from infer.files import Checkpoint
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.sharding import check_even_heads, check_experts

Transport = Literal["memory", "gloo", "nccl"]
Call = tuple[str, tuple[Any, ...]]  # a method of the runner, and its arguments
PROGRAM = ("-m", "infer.engine.tensor_parallel.follower")  # the program of every rank except the first
_HEADER_BYTES, _SPARE = 1 << 14, 16  # kernels may read _SPARE tokens after the last one of a step
_TIMEOUT = timedelta(minutes=10)  # a rank that takes longer for a step hangs


@final
class ModelSource(NamedTuple):
    """Source of a model, and the settings with which each rank loads it."""

    path: Path
    fingerprint: str  # fingerprint of the model's files, which must be the same for all ranks
    settings: ModelSettings
    num_threads: int  # threads of each rank
    devices: tuple[str, ...] = ()  # one device per rank; (): all ranks are on the CPU

    def device_of(self, rank: int) -> str:
        return self.devices[rank] if self.devices else "cpu"


def start_ranks(checkpoint: Checkpoint, settings: ModelSettings) -> "Ranks | None":
    """Start all ranks of a model except the first, each with as many threads as this process. Return None for one rank.

    Raises InvalidRequestError if the model cannot be shared out.
    """
    devices = rank_devices(str(settings.device), settings.tensor_parallel)
    if (size := len(devices)) == 1:
        return None
    if (threshold := settings.cache.memory_threshold_mb) is not None:
        raise InvalidRequestError(
            f"memory_threshold_mb={threshold}: the ranks of tensor_parallel={size} would evict at different moments; "
            "leave it out to evict from the start"
        )
    architecture = make_architecture(checkpoint.config)
    if architecture.reads_whole_texts:
        raise InvalidRequestError(f"tensor_parallel={size} is for models that generate, and this is an encoder: use 1")
    if has_gpus := devices[0] != "cpu":
        _check_gpus(devices)
        check_even_heads(architecture, size)
    check_experts(architecture, size)
    num_threads = ops.backend_of(torch.device(devices[0])).num_threads()
    source = ModelSource(checkpoint.path, checkpoint.fingerprint(), settings, num_threads, devices)
    return Ranks(source, architecture, size, "nccl" if has_gpus else "memory")


def rank_devices(device: str, num_ranks: int) -> tuple[str, ...]:
    """Return the device of each rank. A list of GPUs, such as "cuda:0,1", has a rank for each.

    Raises InvalidRequestError if the list, or its length, is wrong.
    """
    kind, _, listed = device.partition(":")
    indices = listed.split(",")
    if kind != "cuda" or len(indices) == 1:
        if num_ranks > 1 and device != "cpu":
            raise InvalidRequestError(
                f"tensor_parallel={num_ranks} needs device cpu or a list of GPUs such as cuda:0,1, got {device!r:.80}"
            )
        return (device,) * num_ranks
    if not all(index.isdecimal() and index.isascii() for index in indices):
        raise InvalidRequestError(f"device must list GPUs by number, as in cuda:0,1, got {device!r:.80}")
    devices = tuple(f"cuda:{int(index)}" for index in indices)
    if twice := [name for place, name in enumerate(devices) if name in devices[:place]]:
        raise InvalidRequestError(f"device {device:.80} names {twice[0]} twice: name each GPU once")
    if num_ranks not in (1, len(devices)):
        raise InvalidRequestError(
            f"tensor_parallel={num_ranks} and device {device:.80} contradict each other: leave tensor_parallel out, "
            "each GPU has a process"
        )
    return devices


def _check_gpus(devices: Sequence[str]) -> None:
    """Raise InvalidRequestError if one of the GPUs cannot be used, or nothing connects them."""
    for device in devices:
        ops.cuda_backend(device)
    if not distributed.is_nccl_available():
        raise InvalidRequestError(f"devices {', '.join(devices)}: this torch has no NCCL to connect them: use one GPU")


def exchange_bytes(architecture: Architecture) -> int:
    """Return the bytes of the memory that ranks share.

    It has room for three times all activations that a step gathers: floats, records of floats, and the spaces between
    buffers. The system allocates only the pages that are written.
    """
    parts = {part for layer in architecture.layers for part in layer.parts}
    widths = {(type(part), place, width) for part in parts for place, width in enumerate(part.widths)}
    floats = 3 * (HOST_STEP.tokens + _SPARE) * (2 * architecture.hidden_size + sum(width for *_, width in widths))
    return 2 * 4 * (floats + 2 * HOST_STEP.logits * architecture.vocab_size) + _HEADER_BYTES


@final
class Ranks:
    """The other ranks of a group. `group` is rank 0's.

    Only one thread may use it at a time, except for the calls when a process ends.
    """

    def __init__(
        self, source: ModelSource, architecture: Architecture, size: int, transport: Transport = "memory"
    ) -> None:
        self.source = source  # the source from which `load` loads
        self._pending = list[Call]()
        self._failure: str | None = None
        self._is_closed = self._is_midway = False
        self.is_leading = False  # True during a call that the other ranks repeat
        self._processes, self._pipes = list[subprocess.Popen[bytes]](), list[Connection]()
        folder = None if transport == "memory" else tempfile.mkdtemp(prefix="infer-ranks-")
        self._end = weakref.finalize(self, _end, self._processes, self._pipes, folder)
        if folder is None:
            with _shared_memory(exchange_bytes(architecture)) as memory:
                self._start(size, transport, str(memory.fileno()), [memory.fileno()])
        else:
            self._start(size, transport, str(Path(folder) / "meeting"), [])

    def load(self, arguments: Mapping[str, Any]) -> None:
        """Load the ranks' shares, in place of their previous ones, and wait until all have loaded.

        `arguments` are those of each rank's `Runner`, by name. `limits` among them are those of a step that fit in the
        memory of rank 0. Raises InferError with the message of a rank that cannot load.
        """
        self._pending.clear()  # these calls are for the previous runners
        self._send((self.source, arguments))
        for problem in self._answers():
            if problem is not None:
                self.close()
                raise InferError(problem)
        self.check()

    def tell(self, name: str, *arguments: Any) -> None:
        """Queue a method call for the runners of all other ranks, to run before the next `lead`."""
        self._pending.append((name, arguments))

    def lead(self, name: str, *arguments: Any) -> None:
        """Start the queued calls on the other ranks, followed by this one."""
        self.check()
        calls = [*self._pending, (name, arguments)]
        self._pending.clear()
        self._is_midway = True
        self._send(calls)

    def has_led(self) -> None:
        """Record that rank 0 has finished the same call. Raises InferError if a rank has ended meanwhile."""
        self.check()
        self._is_midway = False

    def begin_anew(self) -> None:
        """Make the ranks leave their current step, if any, empty their runners, and wait for the next call."""
        self.check()
        self._pending.clear()
        if self._is_midway:
            self.group.fail()
        self._send([("leave", ())])
        self._answers()  # a slower rank may still wait for this one in the interrupted step
        self.group.begin_anew()
        self._send([("begin_anew", ())])
        self._answers()
        self.check()
        self.group.mend()
        self._is_midway = False

    def digests(self) -> list[bytes]:
        """Return the digest of each rank's last logits."""
        self.lead("digest")
        digests = self._answers()
        self.has_led()
        return digests

    def check(self) -> None:
        """Raise InferError if a rank has ended."""
        if self._failure is not None:
            raise InferError(self._failure)

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        self._is_closed = True
        self.group.fail()
        self._end()

    def note_end(self, rank: int) -> None:
        """Record that a rank has ended or is about to end. Safe to call from any thread."""
        status = self._processes[rank - 1].wait()
        if not self._is_closed:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            self._failure = f"rank {rank} of the model's {self.group.size} ended {how}: load the model again"
            self.group.fail()

    def _start(self, size: int, transport: Transport, place: str, descriptors: Sequence[int]) -> None:
        for rank in range(1, size):
            own, theirs = socket.socketpair()
            with theirs:
                arguments = map(str, (rank, size, transport, place, theirs.fileno()))
                process = subprocess.Popen(
                    [sys.executable, *PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *descriptors],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    start_new_session=True,  # only rank 0 receives Ctrl-C
                )
            self._processes.append(process)
            self._pipes.append(Connection(own.detach()))
        self.group = make_group(0, size, transport, place)
        for rank, process in enumerate(self._processes, 1):
            watched = weakref.ref(self), rank, process
            threading.Thread(target=_watch, args=watched, name=f"infer-rank-{rank}", daemon=True).start()

    def _send(self, message: object) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # the rank has ended, which `_watch` notices
                pipe.send(message)

    def _answers(self) -> list[Any]:
        """Return one answer per rank, or None for a rank that has ended."""
        answers = list[Any]()
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                answers.append(pipe.recv())
            except (EOFError, OSError):
                self.note_end(rank)
                answers.append(None)
        return answers


def _watch(ranks: weakref.ref[Ranks], rank: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process ends, then record it. It runs in a thread and does not keep the ranks alive."""
    process.wait()
    living = ranks()
    if living is not None:
        living.note_end(rank)


def _end(processes: Sequence[subprocess.Popen[bytes]], pipes: Sequence[Connection], folder: str | None) -> None:
    for process in processes:
        process.kill()
        process.wait()
    for pipe in pipes:
        pipe.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _shared_memory(num_bytes: int) -> IO[bytes]:
    """Return a file of shared memory without a name, filled with zeros. The caller closes it."""
    if sys.platform == "linux":
        memory: IO[bytes] = os.fdopen(os.memfd_create("infer-ranks"), "w+b")
    else:
        memory = tempfile.TemporaryFile()  # noqa: SIM115
    memory.truncate(num_bytes)
    return memory


def make_group(rank: int, size: int, transport: Transport, place: str) -> Group:
    """Return the group of a rank.

    `place` is the descriptor of the memory that ranks share, or the file at which torch connects the ranks.
    """
    if transport == "memory":
        return ops.backend_of(torch.device("cpu")).make_group(rank, size, mmap.mmap(int(place), 0))
    return TorchGroup(rank, size, Path(place), transport)


def digest_of(logits: Float[Tensor, "logits vocab"]) -> bytes:
    """Return a digest of logits: a few bytes that ranks compare."""
    return hashlib.blake2b(logits.float().contiguous().cpu().numpy().tobytes(), digest_size=16).digest()


@final
class TorchGroup(Group):
    """Ranks that torch connects, through a file that all can write: NCCL between GPUs, gloo between CPUs.

    An op gathers by a call of torch. A CUDA graph records NCCL's kernels with the ops'. On a CPU's own backend, whose
    recordings hold no calls of torch, nothing is captured.
    """

    def __init__(self, rank: int, size: int, meeting: Path, transport: Literal["gloo", "nccl"] = "gloo") -> None:
        super().__init__(rank, size)
        torch_distributed: Any = distributed  # a torch without CUDA has no NCCL
        make = torch_distributed.ProcessGroupNCCL if transport == "nccl" else torch_distributed.ProcessGroupGloo
        self._ranks: Any = make(torch_distributed.FileStore(str(meeting), size), rank, size, _TIMEOUT)
        self._transport, self._has_failed = transport, False

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def fail(self) -> None:
        self._has_failed = True
        if self._transport == "nccl":  # its kernels would wait on the device for a rank that has ended
            with suppress(RuntimeError):
                self._ranks.abort()

    def begin_anew(self) -> None:
        if self._has_failed:
            raise InferError("a step was interrupted, and ranks that torch connects cannot leave it: load again")

    def mend(self) -> None:
        return

    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        """Gather each rank's columns into one buffer, padded to the width of the widest rank for the transfer."""
        if not len(own):
            return own.new_empty(0, sum(widths))
        padded = F.pad(own.contiguous(), (0, max(widths) - own.shape[1]))
        parts = padded.new_empty(len(widths) * len(padded), padded.shape[1])
        try:
            self._ranks._allgather_base(parts, padded).wait()  # torch's public calls take no group without a default
        except RuntimeError as error:
            self._has_failed = True
            raise InferError(f"another rank of this model has ended ({str(error).splitlines()[0]:.80})") from error
        own_parts = zip(parts.chunk(len(widths)), widths, strict=True)
        return torch.cat([part[:, :width] for part, width in own_parts], dim=1)
