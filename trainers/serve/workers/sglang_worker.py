"""Answers by SGLang's offline engine. Runs in SGLang's environment: `python -I sglang_worker.py FOLDER`.

Written by reading SGLang's documentation, and not run. It hands out no states of chosen layers.
"""

import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from draftsmith_jobs import InTurn, asked, reason, serve


def answers(engine, name, requests, pictures):
    """The answers of one job."""
    images = {"image_data": [shown or None for shown in pictures]} if any(pictures) else {}
    outputs = engine.generate(
        input_ids=[request["ids"] for request in requests],
        sampling_params=[request["sampling"] for request in requests],
        **images,
    )
    return [
        {
            "prompt_tokens": output["meta_info"]["prompt_tokens"],
            "tokens": [int(token) for token in output["output_ids"]],
            "stop": reason(output["meta_info"]["finish_reason"]["type"]),
        }
        for output in outputs
    ]


def main(folder):
    from sglang import Engine

    engine = Engine(**asked(folder)["settings"])
    serve(folder, InTurn(lambda *job: answers(engine, *job)))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
