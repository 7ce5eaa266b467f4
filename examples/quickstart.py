"""Index three documents once, then ask about them: most of the prompt comes from stored KV.

Run after `make setup`: .venv/bin/python examples/quickstart.py
"""

from __future__ import annotations

from kvboost_rag import GenerationParams, KVBoost

DOCUMENTS = [
    "The lighthouse of Arvik was built in 1851. Its lamp burned whale oil until 1888, when it was changed to paraffin.",
    "Arvik's harbour freezes in January and February. In those months the mail comes by sledge from Tornby.",
    "The keeper of the lighthouse in 1890 was Marta Lind, the first woman in the country to hold the office.",
]
QUESTION = "Who was the keeper of the lighthouse in 1890?"


def main() -> None:
    with KVBoost.from_pretrained("bundled:smollm2", store="memory") as engine:
        engine.warm(DOCUMENTS)
        prompt = [{"role": "user", "content": "\n\n".join([*DOCUMENTS, QUESTION])}]
        params = GenerationParams(max_new_tokens=40)
        for reuse in ("off", "blend"):
            # Documents as short as these are computed as a rule, since that costs next to nothing; not here.
            result = engine.generate(prompt, params=params, reuse=reuse, full_below=0)
            usage = result.usage
            print(f"{reuse:<6} {result.text}")
            print(
                f"       {usage.input_tokens} prompt tokens: {usage.cached_tokens} reused, "
                f"{usage.recomputed_tokens} recomputed, {usage.prefilled_tokens} prefilled; "
                f"first token after {result.ttft_ms:.0f} ms"
            )


if __name__ == "__main__":
    main()
