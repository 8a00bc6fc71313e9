"""`infer classify`: the labels of texts as JSON lines."""

import infer
from infer.cli.answers.embed_command import write_lines
from infer.cli.answers.given_texts import GivenText
from infer.cli.answers.rerank_command import noting_cuts
from infer.cli.options.command_options import ClassifyOptions
from infer.cli.terminal.signals import exit_on_signal
from infer.cli.terminal.terminal import Spinner


def run_classify(model: "infer.LLM", texts: list[GivenText], options: ClassifyOptions) -> None:
    """Write one JSON line per text: its labels, the most probable first, and their probabilities."""
    given = [each.text if each.text_pair is None else (each.text, each.text_pair) for each in texts]
    with exit_on_signal(), Spinner("classifying", shown=not options.quiet), noting_cuts(options.quiet):
        found = model.classify(given, truncate=options.truncate)
    write_lines(texts, (each.to_json() for each in found), options.output)
