"""The grammar of an answer, in llguidance's Lark: the format that the parser reads, with the tools' schemas.

Free text is a lexeme, so that it costs only a few microseconds per token. It ends lazily, at a call's trigger. The
grammar names control tokens by their ids. Only this grammar may do so, never a grammar of a request.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import final

from infer.errors import InvalidRequestError, problem_of
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.argument_grammar import ArgumentGrammar, ToolRules
from infer.text.toolcalls.formats import ReasoningFormat
from infer.text.toolcalls.lark_rules import ANY_TEXT, LarkRules, as_pattern, one_of
from infer.text.toolcalls.tools import Tool, anything_for

_MAX_WARNINGS = 10
_SPACES = "[ \\t\\r\\n]*"


def answer_lark(form: AnswerFormat, rules: ToolRules, *, is_held: bool) -> str | None:
    """Return the grammar of an answer, or None if nothing constrains the answer.

    With `is_held`, the answer's text is `@answer`, the request's grammar. Raises InvalidRequestError for a tool whose
    schema cannot be enforced.
    """
    if form.calls is None and not (form.reasoning and (is_held or form.budget is not None)):
        return None
    return _Builder(form, rules, is_held=is_held).lark()


def enforceable(form: AnswerFormat, rules: ToolRules) -> AnswerFormat:
    """Return the format with warnings for each part of a tool's schema that is left out because it cannot be enforced.

    Tools of which nothing can be enforced may have any arguments, and so may those for which no time is left. Raises
    InvalidRequestError if tools cannot be enforced at all.
    """
    calls = form.allowed_calls
    if calls is None:
        return form
    tools, warnings = list(calls.tools), {index: list(tool.warnings) for index, tool in enumerate(calls.tools)}
    sizes = {index: len(json.dumps(tool.parameters)) for index, tool in enumerate(tools) if not tool.is_strict}
    for index in sorted(sizes, key=sizes.__getitem__):  # the bad schema is often a large one
        tool = tools[index]
        problem = "its schema is left out, because other tools used up the time to compile it"
        if rules.begin_tool():
            try:
                grammar = ArgumentGrammar(calls.form, LarkRules(form.marks), rules, tool)
                grammar.rule("arguments")
                warnings[index] += _said(tool.name, grammar.left_out)
                continue
            except InvalidRequestError as error:
                reason = problem_of(error).removeprefix("json_schema: ")
                problem = f"its whole schema is left out, so its arguments may be any object: {reason:.200}"
        warnings[index].append(f"tool {tool.name!r}: {problem}")
        tools[index] = _loosened(tool, calls)
        ArgumentGrammar(calls.form, LarkRules(form.marks), rules, tools[index]).rule("arguments")
    said = tuple(chain.from_iterable(warnings.values()))
    return replace(form, calls=replace(calls, tools=tuple(tools)), warnings=said)


def _said(name: str, left_out: Mapping[str, str]) -> Iterator[str]:
    for pointer, problem in [*left_out.items()][:_MAX_WARNINGS]:
        yield f"tool {name!r}: {pointer:.200} is left out: {problem.removeprefix('json_schema: '):.200}"
    if len(left_out) > _MAX_WARNINGS:
        yield f"tool {name!r}: {len(left_out) - _MAX_WARNINGS} more parts are left out"


def loosest(form: AnswerFormat, error: InvalidRequestError) -> AnswerFormat | None:
    """Return the format with tools that may have any arguments, or None if there is nothing to loosen.

    It is for schemas that are too large only in combination.
    """
    calls = form.allowed_calls
    if calls is None or all(tool.is_strict for tool in calls.tools):
        return None
    tools = tuple(tool if tool.is_strict else _loosened(tool, calls) for tool in calls.tools)
    names = ", ".join(tool.name for tool in calls.tools if not tool.is_strict)
    warning = f"tools {names:.200}: their schemas are left out, their arguments may be any object: {error!s:.200}"
    return replace(form, calls=replace(calls, tools=tools), warnings=(*form.warnings, warning))


def _loosened(tool: Tool, calls: Calls) -> Tool:
    return replace(tool, parameters=anything_for(tool.parameters, is_json=calls.form.syntax == "json"))


@final
class _Builder:
    def __init__(self, form: AnswerFormat, rules: ToolRules, *, is_held: bool) -> None:
        self._form, self._schemas, self._is_held = form, rules, is_held
        self._lark = LarkRules(form.marks)
        self._rules = self._lark.rules

    def lark(self) -> str:
        reasoning = self._form.reasoning
        self._rules["start"] = ""  # the first rule
        if reasoning is not None and reasoning.body:
            self._rules["start"] = self._messages(reasoning)
        else:
            thought = self._thought(reasoning) if reasoning is not None else ""
            self._rules["start"] = " | ".join([f"{thought} ({self._answer()})", *self._calls_in_thought()])
        self._rules["SPACES"] = "/[ \\t\\r\\n]+/"
        self._rules["ANY"] = f"/{ANY_TEXT}/"
        return self._lark.text()

    def _thought(self, form: ReasoningFormat) -> str:
        thought = self._until("thought", form.closing)
        return thought if self._form.is_open else f"({self._opening(form)} {thought})?"

    def _opening(self, form: ReasoningFormat) -> str:
        is_control = self._lark.is_control(form.opening)
        return self._lark.literal(form.opening) if is_control else f"/{_SPACES}{as_pattern(form.opening)}/"

    def _calls_in_thought(self) -> Iterator[str]:
        """Yield one rule per tool: reasoning that is not closed, a call of the tool, and further calls after it."""
        calls, reasoning, beginnings = self._form.calls, self._form.reasoning, self._form.calls_in_reasoning
        if calls is None or reasoning is None or not beginnings:
            return
        opening = "" if self._form.is_open else self._opening(reasoning)
        others = self._calls(calls).removeprefix("call ")
        for index, beginning in enumerate(beginnings):
            yield f"{opening} {self._until(f'cut_{index}', beginning)} {self._end(calls, index)} {others}"

    def _messages(self, form: ReasoningFormat) -> str:
        """Return the rule of messages with headers: reasoning and texts before calls, then the text or a call."""
        calls, following = self._form.allowed_calls, self._lark.literal(form.start + form.role)
        thought, aside = self._until("thought", form.closing), self._until("aside", form.closing)
        self._rules["rest"] = f"{thought} {following}"
        self._rules["reasoned"] = f"{self._lark.literal(form.opening)} rest"
        self._rules["said"] = f"{self._lark.literal(form.channel + form.aside_channel + form.body)} {aside} {following}"
        is_required = calls is not None and calls.kind == "required"
        said = "" if self._is_held or is_required else "said"
        if self._form.budget is not None:  # the budget is for one message
            before = f"{'rest' if self._form.is_open else 'reasoned?'} {said and 'said*'}"
        else:
            before = f"{'rest' if self._form.is_open else ''} ({' | '.join(filter(None, ['reasoned', said]))})*"
        self._rules["typed"] = f'" "? {self._lark.literal(form.constrain)} "json" | " json"'
        text = f"{self._lark.literal(form.channel + form.text_channel)} typed? {self._lark.literal(form.body)}"
        text += " @answer" if self._is_held else " ANY?"
        if calls is None:
            return f"{before} {text}"
        call = self._headed_call(form, calls)
        return f"{before} {call}" if is_required else f"{before} ({text} | {call})"

    def _headed_call(self, form: ReasoningFormat, calls: Calls) -> str:
        """Return the rule of a call with its header. The tool's name may be before or after the channel."""
        self._rules["channel"] = one_of(
            self._lark.literal(form.channel + name) for name in (form.aside_channel, form.own_channel)
        )
        body, after, before = self._lark.literal(form.body), list[str](), list[str]()
        for index, tool in enumerate(calls.tools):
            name, end = self._lark.literal(calls.form.before_name + tool.name), self._end(calls, index)
            after.append(f"{name} typed? {body} {end}")
            before.append(f"{name} channel typed? {body} {end}")
        return f'(channel " " {one_of(after)} | " "? {one_of(before)})'

    def _answer(self) -> str:
        calls = self._form.allowed_calls
        text = self._tagged("SPACES? @answer" if self._is_held else self._text())
        if calls is None:
            return text
        rest = self._calls(calls)
        if calls.kind == "required":
            spaces = "SPACES?" if self._form.reasoning is not None else ""
            return f"{spaces} {self._lark.literal(calls.form.start)} {rest}"
        if self._is_held:
            return f"{text} | SPACES? {self._lark.literal(calls.form.start)} {rest}"
        if calls.form.trigger:
            begun = self._until("begun", calls.form.trigger, self._not_text())
            return f"{text} | {begun} {self._lark.literal(calls.form.start[len(calls.form.trigger) :])} {rest}"
        if len(calls.form.start) > 1:
            return f"{text} | /{_SPACES}{as_pattern(calls.form.start)}/ {rest}"
        return f"{text} | {self._calls_at_once(calls)}"

    def _tagged(self, text: str) -> str:
        """Return the rule of a text that may be between the tags of an answer."""
        reasoning = self._form.reasoning
        if reasoning is None or not reasoning.answer_opening:
            return text
        opening, closing = map(self._lark.literal, (reasoning.answer_opening, reasoning.answer_closing))
        return f"(SPACES? {opening})? {text} ({closing})?"

    def _text(self) -> str:
        calls, excluded = self._form.calls, self._not_text()
        trigger = calls.form.trigger if calls is not None and calls.kind == "none" else ""
        if trigger and not self._lark.is_control(trigger):
            excluded = " & ".join(filter(None, [excluded, f"~/{ANY_TEXT}{as_pattern(trigger)}{ANY_TEXT}/"]))
        if not excluded:
            return "ANY"
        self._rules["TEXT"] = f"/{ANY_TEXT}/ & {excluded}"
        return "TEXT"

    def _not_text(self) -> str:
        """Return a rule that excludes beginnings of an answer that are not text."""
        calls, beginnings = self._form.calls, list[str]()
        if self._form.reasoning is not None and not self._form.is_open:
            beginnings.append(self._form.reasoning.opening)
        if calls is not None and not calls.form.trigger:
            beginnings += calls.beginnings
        plain = [as_pattern(each) for each in beginnings if not self._lark.is_control(each)]
        return f"~/{_SPACES}({'|'.join(plain)}){ANY_TEXT}/" if plain else ""

    def _until(self, name: str, literal: str, excluded: str = "") -> str:
        """Return a rule for any text up to and including the first occurrence of this literal."""
        if self._lark.is_control(literal):
            return f"{'TEXT' if excluded else 'ANY'}? {self._lark.literal(literal)}"
        self._rules[f"{name}[lazy]"] = f"/{ANY_TEXT}{as_pattern(literal)}/{' & ' + excluded if excluded else ''}"
        return name

    def _calls(self, calls: Calls) -> str:
        """Return the rule of the calls from the first name on."""
        self._rules["call"] = " | ".join(self._call(calls, index) for index in range(len(calls.tools)))
        _, separator, closing = calls.form.around_calls
        following = self._lark.literal(separator + calls.form.before_name)
        more = f"({following} call)*" if calls.is_parallel and calls.form.is_parallel else ""
        return f"call {more} {self._lark.literal(closing)}"

    def _calls_at_once(self, calls: Calls) -> str:
        """Return the rule of calls that only a tool's name distinguishes from text.

        They begin with one lexeme per tool.
        """
        rest = self._calls(calls).removeprefix("call ")
        firsts = [
            f"/{_SPACES}{as_pattern(beginning)}/ {self._end(calls, index)}"
            for index, beginning in enumerate(calls.beginnings)
        ]
        self._rules["first"] = " | ".join(firsts)
        return f"first {rest}"

    def _call(self, calls: Calls, index: int) -> str:
        return f"{self._lark.literal(calls.tools[index].name + calls.form.before_arguments)} {self._end(calls, index)}"

    def _end(self, calls: Calls, index: int) -> str:
        """Return the rule of a tool's arguments and the literal after them."""
        name, tool = f"arguments_{index}", calls.tools[index]
        if name not in self._rules:
            try:
                self._rules[name] = ArgumentGrammar(calls.form, self._lark, self._schemas, tool).rule(name)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"tools[{index}] ({tool.name}): {error}") from error
        return f"{name} {self._lark.literal(calls.form.after_arguments)}"
