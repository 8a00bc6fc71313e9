"""A Ray cluster of this machine, which programs join. The folder of its logs identifies its processes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

PATIENCE = 120.0  # seconds: the machine may be busy
_OBJECT_STORE = f"--object-store-memory={100 * 2**20}"
_LOG_LINES = 40
_TOKEN = os.urandom(32).hex()
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": _TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 without it: beside other programs an engine would hardly run
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


def environment_of(folder: Path, address: str | None = None) -> dict[str, str]:
    """Return the environment of programs that start a cluster, or that join it. Metrics are pushed often."""
    joined = {} if address is None else {"RAY_ADDRESS": address}
    return {**os.environ, **_ENVIRONMENT, "RAY_TMPDIR": str(folder), **joined}


@final
class RayCluster(NamedTuple):
    """A cluster by its folder. The folder's name is short, because sockets are in it."""

    folder: Path

    def processes(self, name: str = "") -> list[int]:
        """Return the processes whose command line begins with a name."""
        return [number for number, words in self._commands() if words.startswith(name)]

    def address(self) -> str:
        """Return the address for programs that join the cluster."""
        found = (re.search(r"--gcs[-_]address=([\d.]+:\d+)", words) for _, words in self._commands())
        return next(match[1] for match in found if match)

    def has_head(self) -> bool:
        """Return True while Ray's control service (GCS) runs. Without it, the cluster does not work."""
        return any(words.split(" ", 1)[0].endswith("/gcs_server") for _, words in self._commands())

    def logs(self) -> str:
        """Return the last lines that the control service, the raylet and the engines have logged."""
        files = sorted(file for name in ("gcs_server", "raylet", "worker") for file in self.folder.rglob(f"{name}*.*"))
        return "\n".join("\n".join([file.name, *file.read_text().splitlines()[-_LOG_LINES:]]) for file in files)

    def kill(self) -> None:
        """Kill the processes of the cluster, and wait until they are gone."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        wait_until(lambda: not self.processes())

    def _commands(self) -> Iterator[tuple[int, str]]:
        for found in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                opened = [os.readlink(link) for link in (found / "fd").iterdir()]
                if any(path.startswith(f"{self.folder}/") for path in opened):
                    yield int(found.name), (found / "cmdline").read_text().replace("\0", " ")


def wait_until(condition: Callable[[], object]) -> None:
    """Raise TimeoutError if the condition stays false."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s")
        time.sleep(0.1)


@contextmanager
def running_cluster(num_cpus: int) -> Iterator[RayCluster]:
    """Run a cluster. None of its processes is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        cluster = RayCluster(Path(name))
        options = f"--head --include-dashboard=false --port=0 --num-cpus={num_cpus} --temp-dir={name}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options.split(), _OBJECT_STORE]
        try:
            subprocess.run(command, env=environment_of(cluster.folder), check=True, capture_output=True)
            yield cluster
        finally:
            cluster.kill()
