"""Answer a file of rows by several models through Ray Data. If killed and run again, it continues where it ended."""

import sys
from pathlib import Path

import ray

from infer import BatchEngine
from infer.serving.batch_file.output_file import OutputFile


def main(source: str, output: str, model: str = "smollm2", engines: str = "2", threads: str = "1") -> None:
    with OutputFile(Path(output), model) as file:
        rows = ray.data.read_text(source, override_num_blocks=64, ray_remote_args={"num_cpus": 0})
        lines = rows.map_batches(  # engines may take all CPUs, so reading takes none
            BatchEngine,
            fn_constructor_kwargs={"model": model, "threads": int(threads), "finished": file.finished},
            compute=ray.data.ActorPoolStrategy(size=int(engines)),
            num_cpus=int(threads),
            batch_format="pyarrow",
            batch_size=16,
        )
        for row in lines.iter_rows():
            file.write(row["line"])


if __name__ == "__main__":
    main(*sys.argv[1:])
