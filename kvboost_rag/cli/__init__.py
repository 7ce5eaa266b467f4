"""The command line, `kvboost-rag`: one command a file.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Annotated

import typer

from kvboost_rag import __version__
from kvboost_rag.cli.ask import ask
from kvboost_rag.cli.calibrate import calibrate
from kvboost_rag.cli.console import errors
from kvboost_rag.cli.demo import demo
from kvboost_rag.cli.evict import evict
from kvboost_rag.cli.gc import gc
from kvboost_rag.cli.inspect import inspect
from kvboost_rag.cli.plan import plan
from kvboost_rag.cli.probe import probe
from kvboost_rag.cli.profile import profile
from kvboost_rag.cli.rewarm import rewarm
from kvboost_rag.cli.serve import serve
from kvboost_rag.cli.verify import verify
from kvboost_rag.cli.warm import warm

FIRST_STEPS = """kvboost-rag reuses documents' KV caches when a local language model answers questions about them.

First:   kvboost-rag demo               three questions, answered by full prefill and by reuse
Then:    kvboost-rag warm docs          compute the KV of your own files, once
         kvboost-rag ask "A question?"  answer from them, and see what was reused
Models:  kvboost-rag probe MODEL        can this model's KV be reused?
All commands: kvboost-rag --help"""

app = typer.Typer(
    no_args_is_help=False, invoke_without_command=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
for command in (demo, plan, warm, rewarm, ask, serve, inspect, verify, gc, evict, probe, calibrate, profile):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvboost-rag {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Reuse documents' KV caches when a local language model answers questions about them."""
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS)


def main() -> None:
    """Entry point of the console script. An error is one line on stderr and exit code 1 (130 after Ctrl-C)."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when a command imports tqdm; its bars would tear ours apart
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal has not is no reason to stop
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except KeyboardInterrupt:
        errors.print("stopped")
        sys.exit(130)
    except Exception as error:
        if os.environ.get("KVBOOST_DEBUG"):
            raise
        errors.print(f"error: {one_line(error)}", style="bold red", highlight=False, soft_wrap=True)
        sys.exit(1)


def one_line(error: Exception) -> str:
    """What went wrong as one line. Errors meant for users say it themselves; others come with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError, RuntimeError)) and text:
        return text
    return f"{type(error).__name__}: {text} (KVBOOST_DEBUG=1 shows where)"
