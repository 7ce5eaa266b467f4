"""Is it still the same model? Settings of reuse measured against full prefill, and the cheapest good one chosen."""

from kvboost_rag.measure.calibrate.grid import QUICK_GRID, default_grid
from kvboost_rag.measure.calibrate.measure import Answered, Comparison, EvalPrompt, compare, reference_answer
from kvboost_rag.measure.calibrate.questions import EvalQuestion, builtin_questions, prompt_of, read_questions
from kvboost_rag.measure.calibrate.run import CalibrationPlan, CalibrationProgress, calibrate, nearest_texts

__all__ = [
    "QUICK_GRID",
    "Answered",
    "CalibrationPlan",
    "CalibrationProgress",
    "Comparison",
    "EvalPrompt",
    "EvalQuestion",
    "builtin_questions",
    "calibrate",
    "compare",
    "default_grid",
    "nearest_texts",
    "prompt_of",
    "read_questions",
    "reference_answer",
]
