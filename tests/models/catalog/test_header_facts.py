"""Claims about the facts that lists of models show."""

import os
from pathlib import Path

import gguf

from gguf_files import write_model
from infer.models.catalog.header_facts import read_facts


def test_the_facts_are_those_of_the_file_that_has_the_name_now(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for seconds, name in enumerate(("Q8_0", "Q4_0")):  # their headers have the same size
        file_type = gguf.LlamaFileType[f"MOSTLY_{name}"]
        write_model(path, extend=lambda writer, of=file_type: writer.add_file_type(of))
        os.utime(path, (seconds, seconds))
        facts = read_facts(str(path))
        assert (facts.weights, facts.modified_at) == (name, seconds)
        assert read_facts(str(path)) is facts
