"""Asks one question through the SDK and says which tier answered.

python examples/openai_client.py                         # the demo model in the package, on this device
UPDRAFT_CLOUD_URL=http://127.0.0.1:8000 UPDRAFT_CLOUD_MODEL=large python examples/openai_client.py    # and a cloud
"""

from __future__ import annotations

import os

from updraft import OpenAI, routing


def main() -> None:
    has_cloud = "UPDRAFT_CLOUD_URL" in os.environ
    with OpenAI(local="pocket") as client:
        reply = client.chat.completions.create(
            model="auto" if has_cloud else "local",
            messages=[{"role": "user", "content": "What is 17 + 25?"}],
        )
    print(reply.choices[0].message.content)
    if info := routing(reply):
        print(f"answered by: {info.tier}, because: {info.reason}")


if __name__ == "__main__":
    main()
