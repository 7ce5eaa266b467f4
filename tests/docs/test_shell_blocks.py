"""Commands that README and docs name exist, with every option."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from pages import PAGES, ROOT, SHELL, Block, blocks_of

from kvboost_rag.cli import app

FOREIGN = ("kubectl", "helm")
UsageError = typer.BadParameter.__mro__[1]  # what a command line that cannot be raises; typer brings its own click
INLINE = re.compile(r"`((?:kvboost-rag |python benchmarks/|python -m kvboost|make |pip install )[^`]*)`")

BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.language in SHELL]
SPANS = [
    (f"{page}:{number}", span)
    for page in PAGES
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1)
    for span in INLINE.findall(line)
]


def commands(code: str) -> list[list[str]]:
    """The words of each command of a block; comments, assignments in front and continued lines are seen through."""
    found, open_quote = [], ""
    for line in code.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(open_quote + line, comments=True)
        except ValueError:  # a quotation goes on in the next line
            open_quote += line + "\n"
            continue
        open_quote = ""
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        found += [words] if words else []
    return found


def check(words: list[str], complete: bool = True) -> None:
    """That a command can be given.

    Args:
        complete: it is parsed as it stands; otherwise (`kvboost-rag evict --source ID | --all`) its options are known.

    Raises:
        AssertionError, UsageError: what is wrong with it.
    """
    first, *rest = words
    if first == "kvboost-rag":
        check_command_line(rest, complete)
    elif first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), f"make has no target {rest}"
    elif first == "python":
        check_program(rest)
    elif words[:2] == ["pip", "install"]:
        check_extras(rest)
    else:
        assert first in FOREIGN, f"nobody checks {first!r}"
    for path in rest:
        if path.startswith(("deploy/", "examples/", "scripts/")):
            assert (ROOT / path).exists(), f"{path} is not there"


def check_command_line(arguments: list[str], complete: bool) -> None:
    group = typer.main.get_command(app)
    context = group.context_class(group, info_name="kvboost-rag")
    name, command, rest = group.resolve_command(context, arguments)
    if complete:
        command.make_context(name, rest, parent=context)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= known | {"--help"}


def check_program(arguments: list[str]) -> None:
    """A program of the repository: it is there, and its source (or what it imports) knows the words."""
    if arguments[0] == "-m":
        module = arguments[1].replace(".", "/")
        assert module.startswith("vllm/") or any((ROOT / shelf / f"{module}.py").exists() for shelf in (".", "kernels"))
        return
    source = (ROOT / arguments[0]).read_text()
    for name in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE):
        beside = (ROOT / arguments[0]).with_name(f"{name}.py")
        source += beside.read_text() if beside.exists() else ""
    options = [word for word in arguments[1:] if re.fullmatch(r"--[a-z-]+|[a-z]+", word)]
    unknown = [word for word in options if not re.search(rf"""["']{re.escape(word)}["']|def {word}\b""", source)]
    assert not unknown, f"{arguments[0]} knows nothing of {unknown}"


def check_extras(requirements: list[str]) -> None:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = re.findall(r"^([\w-]+) = \[", table, re.MULTILINE)
    for requirement in requirements:
        for name in re.findall(r"kvboost-rag\[([\w,-]+)\]", requirement):
            assert set(name.split(",")) <= set(extras), f"{requirement}: there is no such extra"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_commands_of_a_block_can_be_given(block: Block) -> None:
    for words in commands(block.code):
        check(words)


@pytest.mark.parametrize(("place", "span"), SPANS, ids=[f"{place} {span[:40]}" for place, span in SPANS])
def test_commands_in_a_sentence_have_these_options(place: str, span: str) -> None:
    for words in commands(span.replace("…", "").replace("|", " ")):
        check(words, complete=False)


def test_every_fence_says_its_language() -> None:
    """What is not marked is checked by nobody."""
    silent = [block.place for page in PAGES for block in blocks_of(page) if not block.language]
    assert not silent, f"say python, sh, diff or text: {silent}"


@pytest.mark.parametrize(
    "wrong",
    ["kvboost-rag warmer docs", "kvboost-rag warm docs --neighbors 3", "make everything", "rm -rf x",
     "python benchmarks/quality.py --no-such", "python benchmarks/none.py", "pip install kvboost-rag[nothing]"],
)  # fmt: skip
def test_what_does_not_exist_is_noticed(wrong: str) -> None:
    with pytest.raises((AssertionError, UsageError, OSError)):
        check(commands(wrong)[0])


def test_comments_of_a_page_are_understood() -> None:
    page = Path("page.md")
    text = "<!-- not run: no GPU -->\n\n```python\nx\n```\n\n<!-- setup\ny = 1\n-->\n\n```python\nz\n```\n"
    first, second = blocks_of(page, text)
    assert (first.reason, first.setup, first.line) == ("no GPU\n".strip(), "", 4)
    assert (second.reason, second.setup.strip()) == ("", "y = 1")
    with pytest.raises(ValueError, match="before paragraph"):
        blocks_of(page, "<!-- not run: why -->\n\nA sentence.\n")
