"""What a chat template reads: its variables, and the fields of messages, by its syntax tree."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables

from guided_spec.errors import PromptError

EACH = "[]"
"""In a path: any item of what stands before it."""

# What templates are told besides the messages: whether to think, how much, and how much to say.
THINKING = frozenset({"enable_thinking", "thinking"})
PLAIN = "medium"  # OpenAI's default, which asks for nothing
STYLES = {
    "reasoning_effort": ("none", "minimal", "low", PLAIN, "high", "xhigh", "max"),
    "verbosity": ("low", PLAIN, "high"),
}

_Path = tuple[str, ...]
_MESSAGE: _Path = ("messages", EACH)
_LONGEST = 8  # of a path: a template may walk down what refers to itself
_ROUNDS = 4  # in which names that are set from each other are followed
# Of Jinja and transformers: not the caller's to set.
_GLOBALS = frozenset({"raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum"})
_OF_ITEMS = frozenset({"map", "selectattr", "rejectattr", "groupby", "sum", "sort", "unique"})


class TemplateReads(NamedTuple):
    """What a template reads.

    variables: names that it does not set itself. paths: from ``messages`` on, as in ("messages",
    "[]", "content"). roles: those that it tells apart. tests_content: whether it asks what content
    is, a string or parts.
    """

    variables: frozenset[str] = frozenset()
    paths: frozenset[_Path] = frozenset()
    roles: frozenset[str] = frozenset()
    tests_content: bool = False

    def fields(self, *path: str) -> frozenset[str]:
        """The names that it reads of a message, or of what ``path`` leads to in one."""
        whole = (*_MESSAGE, *path)
        at = len(whole)
        return frozenset(p[at] for p in self.paths if len(p) > at and p[:at] == whole) - {EACH}

    @property
    def takes_parts(self) -> bool:
        """Whether it reads content in parts."""
        return any(
            path[:4] == (*_MESSAGE, "content", EACH) and len(path) > 4 for path in self.paths
        )

    @property
    def takes_parts_alone(self) -> bool:
        """Whether content in one string would not be shown."""
        return self.takes_parts and not self.tests_content


def template_text(tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """The template that a chat is rendered with, "" where there is none.

    variables: that it gets; "chat_template" among them takes its place. Raises PromptError.
    """
    given = variables.get("chat_template")
    if not given and not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        text: str = tokenizer.get_chat_template(given, tools=variables.get("tools"))
    except ValueError as error:  # several, and none for this
        raise PromptError(f"prompt: the tokenizer has no chat template for it: {error}") from error
    return text


def render_arguments(tokenizer: Any) -> frozenset[str]:
    """The names that a template's variables cannot have: they steer how it is rendered."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    names = {name for name, each in own.items() if each.kind is not each.VAR_KEYWORD}
    return frozenset({*names, "messages", "self"} - {"documents"})  # these a template reads


@lru_cache(maxsize=32)
def template_reads(template: str) -> TemplateReads:
    """What the template reads; nothing of one that cannot be parsed: it fails when it renders."""
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])  # noqa: S701
    try:
        tree = environment.parse(template)
        walk = _Walk(tree)
        paths, roles, tests = walk.read(), walk.roles(), walk.tests_content()
        own = walk.own_names()
        variables = find_undeclared_variables(tree) - own  # the last: it changes the tree
    except (TemplateError, RecursionError):
        return TemplateReads()
    return TemplateReads(frozenset(variables) - _GLOBALS, paths, roles, tests)


class _Generation(Extension):
    """The block that transformers' templates have around answers; it reads nothing itself."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Walk:
    """Which paths the expressions of a tree may stand for, whatever its conditions say."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._known: defaultdict[str, set[_Path]] = defaultdict(set)  # by names of variables
        self._known["messages"] = {("messages",)}
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for _ in range(_ROUNDS):
            for node in tree.find_all((nodes.For, nodes.Assign, nodes.Call, nodes.With)):
                for name, paths in self._bound(node):
                    self._known[name] |= paths

    def read(self) -> frozenset[_Path]:
        """All paths that are read."""
        found: set[_Path] = set()
        methods = {id(call.node) for call in self._tree.find_all(nodes.Call)}
        for node in self._tree.find_all(nodes.Expr):
            if id(node) not in methods:
                found |= self._paths(node)
            if isinstance(node, nodes.Compare):
                for op in node.ops:
                    if op.op in ("in", "notin") and isinstance(node.expr, nodes.Const):
                        found |= _below(self._paths(op.expr), str(node.expr.value))
            if isinstance(node, nodes.Filter) and node.name in _OF_ITEMS and node.node is not None:
                found |= _below(self._paths(node.node), EACH, *_attribute(node))
        return frozenset(found)

    def roles(self) -> frozenset[str]:
        """Texts that a message's role is compared with."""
        found: set[str] = set()
        for node in self._tree.find_all(nodes.Compare):
            sides = [node.expr, *(op.expr for op in node.ops)]
            if any((*_MESSAGE, "role") in self._paths(side) for side in sides):
                found |= {text for side in sides for text in _texts(side)}
        return frozenset(found)

    def tests_content(self) -> bool:
        """Whether it asks of content whether it is of some kind."""
        tests = self._tree.find_all(nodes.Test)
        asked = [one for one in tests if one.name not in ("defined", "undefined", "none")]
        return any((*_MESSAGE, "content") in self._paths(one.node) for one in asked)

    def own_names(self) -> frozenset[str]:
        """Names that are set here, and not asked for: whether they are there, or else a default."""
        tests = [t for t in self._tree.find_all(nodes.Test) if t.name in ("defined", "undefined")]
        defaults = [f for f in self._tree.find_all(nodes.Filter) if f.name in ("default", "d")]
        of = [one.node for one in tests] + [one.node for one in defaults]
        asked = {one.name for one in of if isinstance(one, nodes.Name)}
        names = self._tree.find_all(nodes.Name)
        return frozenset(name.name for name in names if name.ctx in ("store", "param")) - asked

    def _bound(self, node: nodes.Node) -> Iterator[tuple[str, set[_Path]]]:
        """Names that a statement gives to paths."""
        match node:
            case nodes.For():
                paths = _below(self._paths(node.iter), EACH)
                yield "loop", paths
                yield from _names(node.target, paths)
            case nodes.Assign():
                yield from _names(node.target, self._paths(node.node))
                if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Call):
                    for one in node.node.kwargs:  # of a namespace
                        yield f"{node.target.name}.{one.key}", self._paths(one.value)
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    yield from _names(target, self._paths(value))
            case nodes.Call(node=nodes.Name(name=name)) if name in self._macros:
                for target, value in zip(self._macros[name].args, node.args, strict=False):
                    yield target.name, self._paths(value)
                for one in node.kwargs:
                    yield one.key, self._paths(one.value)

    def _paths(self, node: Any) -> set[_Path]:  # noqa: C901 - a case for each kind of expression
        match node:
            case nodes.Name():
                return self._known[node.name]
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return self._known["loop"] if node.attr in ("previtem", "nextitem") else set()
            case nodes.Getattr(node=nodes.Name(name=name)):
                own = _below(self._known[name], node.attr)
                return own | self._known[f"{name}.{node.attr}"]
            case nodes.Getattr():
                return _below(self._paths(node.node), node.attr)
            case nodes.Getitem(arg=nodes.Const(value=str(name))):
                return _below(self._paths(node.node), name)
            case nodes.Getitem(arg=nodes.Slice()):
                return self._paths(node.node)
            case nodes.Getitem():
                return _below(self._paths(node.node), EACH)
            case nodes.Call(
                node=nodes.Getattr(attr="get", node=of), args=[nodes.Const() as key, *_]
            ):
                return _below(self._paths(of), str(key.value))
            case nodes.Filter(name="first" | "last"):
                return _below(self._paths(node.node), EACH)
            case nodes.Filter():
                return self._paths(node.node)
            case nodes.CondExpr():
                return self._paths(node.expr1) | self._paths(node.expr2)
            case nodes.BinExpr():
                return self._paths(node.left) | self._paths(node.right)
            case nodes.List() | nodes.Tuple():
                items = {path for item in node.items for path in self._paths(item)}
                return {path[:-1] for path in items if path[-1:] == (EACH,)}
        return set()


def _below(paths: set[_Path], *names: str) -> set[_Path]:
    return {(*path, *names) for path in paths if len(path) + len(names) <= _LONGEST}


def _names(target: nodes.Node, paths: set[_Path]) -> Iterator[tuple[str, set[_Path]]]:
    if isinstance(target, nodes.Name):
        yield target.name, paths
    elif isinstance(target, nodes.NSRef):
        yield f"{target.name}.{target.attr}", paths


def _attribute(node: nodes.Filter) -> list[str]:
    """The attribute of each item that a filter looks at."""
    given = [one.value for one in node.kwargs if one.key == "attribute"] or node.args[:1]
    if node.name == "map" and not node.kwargs:
        given = []
    texts = [one.value for one in given if isinstance(one, nodes.Const)]
    return str(texts[0]).split(".") if texts else []


def _texts(node: nodes.Node) -> list[str]:
    consts = [node, *(node.items if isinstance(node, nodes.List | nodes.Tuple) else [])]
    return [c.value for c in consts if isinstance(c, nodes.Const) and isinstance(c.value, str)]
