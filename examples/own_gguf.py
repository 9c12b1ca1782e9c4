"""Runs your own GGUF file on the device, with an OpenAI-compatible cloud for escalations.

    OPENAI_API_KEY=sk-... python examples/own_gguf.py path/to/model.gguf gpt-4o

Without a calibrated policy for this pair, `model="auto"` goes to the cloud: see docs/guides/calibrate.md.
"""

from __future__ import annotations

import os
import sys

from updraft import OpenAI


def main(path: str, cloud_model: str) -> None:
    client = OpenAI(
        local=path,
        cloud_url=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        cloud_api_key=os.environ["OPENAI_API_KEY"],
        cloud_model=cloud_model,
    )
    with client:
        for model in ("local", "auto"):
            reply = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Name three rivers."}], max_tokens=64
            )
            print(f"{model}: {reply.choices[0].message.content}")
            print(f"  tier {reply.updraft['tier']}: {reply.updraft['reason']}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: own_gguf.py MODEL.gguf CLOUD_MODEL")
    main(*sys.argv[1:])
