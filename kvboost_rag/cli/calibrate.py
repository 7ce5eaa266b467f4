"""`kvboost-rag calibrate`: which settings keep this model's answers?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvboost_rag.cli import options
from kvboost_rag.cli.console import console, progress_bar, styled

if TYPE_CHECKING:
    from kvboost_rag.measure.calibrate import CalibrationPlan
    from kvboost_rag.models.load import LoadedModel
    from kvboost_rag.models.profile import ModelProfile

FAILED = 3


def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file or bundled:smollm2.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Your questions: JSON records of `question`, `docs`, `answers`. Default: built-in ones."),
    ] = None,
    max_kl: Annotated[
        float, typer.Option(min=0, callback=options.finite, help="Tolerated distance from full prefill, in nats.")
    ] = 0.05,
    budget: Annotated[
        float,
        typer.Option(
            min=0, callback=options.finite, help="Minutes it may take, about; at least three questions are asked."
        ),
    ] = 10,
    questions: Annotated[int, typer.Option(min=1, help="Questions to ask at most.")] = 20,
    quick: Annotated[bool, typer.Option(help="Three strategies, no neighbours, no quantisation.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
) -> None:
    """Measure strategies, ratios, neighbours and quantisation against full prefill, and keep the best for this model.

    Engines that load the model afterwards use the fastest setting within the tolerance. Exit code 3 if there is
    none: such a model is served with exact reuse only.

    Example: kvboost-rag calibrate bundled:smollm2 --budget 5
    """
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.session import load
    from kvboost_rag.measure.calibrate import CalibrationProgress
    from kvboost_rag.measure.calibrate import calibrate as run_calibration
    from kvboost_rag.models.profile import save_profile

    loaded = load(ModelChoice(model, dtype, device))
    plan = _plan(loaded, data, (max_kl, budget, questions, quick))
    with progress_bar("{task.completed}/{task.total} questions") as bar:
        tasks: dict[str, object] = {}

        def show(state: CalibrationProgress) -> None:
            if state.phase not in tasks:
                tasks[state.phase] = bar.add_task(state.phase, total=state.num_steps)
            bar.update(tasks[state.phase], completed=state.step)  # type: ignore[arg-type]

        profile = run_calibration(loaded, plan, progress=show)
    console.print(calibration_table(profile))
    path = save_profile(profile)
    console.print(f"profile    {path}", highlight=False)
    if profile.chosen is None:
        why = f": no setting is within {max_kl:g} nats; only exact reuse will be used"
        console.print(styled("failed", "bold red", why))
        raise typer.Exit(FAILED)
    console.print(styled("chosen", "bold green", f"     {profile.chosen.label}"))
    if profile.chosen.neighbours or profile.chosen.quantization != "none":
        console.print(
            f"           documents are warmed with neighbours={profile.chosen.neighbours} and "
            f"quantization={profile.chosen.quantization} from now on; run `kvboost-rag warm` again for those that are "
            "stored already",
            highlight=False,
        )


def _plan(loaded: LoadedModel, data: Path | None, limits: tuple[float, float, int, bool]) -> CalibrationPlan:
    from kvboost_rag.measure.calibrate import (
        QUICK_GRID,
        CalibrationPlan,
        builtin_questions,
        default_grid,
        read_questions,
    )
    from kvboost_rag.prompt.tokens import PromptTokens

    max_kl, minutes, count, quick = limits
    if data is not None:
        asked, source = read_questions(data)[:count], str(data)
    else:
        asked = builtin_questions(PromptTokens(loaded.tokenizer).count, count)
        source = "built-in: reference texts of the standard library"
    return CalibrationPlan(
        asked,
        source,
        QUICK_GRID if quick else default_grid(),
        () if quick else ("k8v8", "k8v4"),
        max_kl,
        budget_s=60 * minutes,
    )


def calibration_table(profile: ModelProfile) -> Table:
    """One line a setting, fastest first."""
    title = (
        f"{profile.model}: {profile.num_prompts} questions ({profile.data}), {profile.num_answered} of them answered "
        "by full prefill"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    for column in ("KL first", "KL mean", "KL upper", "agree", "same answer", "F1 kept", "answers kept", "faster"):
        table.add_column(column, justify="right")
    for m in sorted(profile.measured, key=lambda m: -m.ttft_ratio):
        kept = ["" if value is None else f"{value:.0%}" for value in (m.f1_recovery, m.em_recovery)]
        figures = [f"{kl:.3f}" for kl in (m.kl_first, m.kl_mean, m.kl_upper)]
        style = "bold" if m.setting == profile.chosen else "" if m.kl_upper <= profile.max_kl else "dim"
        table.add_row(
            m.setting.label,
            *figures,
            f"{m.agreement:.1%}",
            f"{m.identical:.0%}",
            *kept,
            f"{m.ttft_ratio:.1f} x",
            style=style,
        )
    return table
