"""What is printed is printed as it is, whatever it holds and wherever it goes."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table

from kvboost_rag import cli
from kvboost_rag.cli.console import console, errors, progress_bar, styled

ODD = "notes [draft] [/bold] [red]x :key: ü"


def test_names_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    table = Table("name", title=ODD)
    table.add_row(ODD)
    table.caption = ODD
    with progress_bar() as bar:
        bar.add_task(ODD, total=1)
    console.print(table)
    console.print(f"skipped    {ODD}")
    console.print(styled("sound", "bold green", f"   {ODD}"))
    errors.print(f"error: {ODD}")
    out, err = capsys.readouterr()
    assert out.count(ODD) == 6
    assert err == f"error: {ODD}\n"


@pytest.mark.parametrize(("stream", "printer"), [("stdout", console), ("stderr", errors)])
def test_a_terminal_without_the_characters_stops_nothing(monkeypatch, stream, printer):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(cli, "app", lambda: printer.print("ü \u2502 \udcff"))
    cli.main()
    assert shown.getvalue() == b"\\xfc \\u2502 \\udcff\n"
