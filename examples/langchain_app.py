"""LangChain over a running `updraft serve`. Needs `pip install langchain-openai`."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]


def main() -> None:
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:4114/v1")
    chat = ChatOpenAI(base_url=url, api_key="any", model="auto")
    print(chat.invoke("What is 17 + 25?").content)


if __name__ == "__main__":
    main()
