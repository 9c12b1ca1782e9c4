"""Small talk: greetings, thanks, and the pocket pair's identity and abilities."""

from __future__ import annotations

import random

from .kind import Draft, Kind, Phrasings

ABOUT = (
    "I am a pocket model: I do sums, dates, clock times, units, sorting, spelling, small logic puzzles, capitals "
    "and JSON."
)

_TALK: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("hello", "Hello! Ask me a sum, a date or a capital.",
     ("hi", "hello", "hey", "hi there", "hello there", "good morning", "good evening", "hey you", "greetings",
      "howdy", "hiya", "yo", "good afternoon", "good day", "hello again", "hi pocket")),
    ("how-are-you", "I am fine, thank you. What shall we work out?",
     ("how are you", "how are you doing", "how is it going", "are you well", "how do you do", "what's up",
      "how's it going", "how are you today", "are you ok")),
    ("ability", ABOUT,
     ("what can you do", "what can you do for me", "what do you know", "help", "help me", "how can you help me",
      "what are you good at", "tell me what you can do", "what should I ask you",
      "what can I ask you", "what questions can you answer", "what are your abilities")),
    ("identity", "I am pocket, a tiny language model that ships with Updraft.",
     ("who are you", "what are you", "what is your name", "are you a robot", "are you a person", "what model are you",
      "tell me about yourself", "who made you", "what's your name", "are you human", "are you an AI",
      "introduce yourself")),
    ("thanks", "You are welcome!",
     ("thanks", "thank you", "thank you very much", "thanks a lot", "great, thanks", "many thanks", "cheers",
      "thank you so much", "thx", "perfect, thank you")),
    ("bye", "Goodbye! Come back with another question.",
     ("bye", "goodbye", "see you", "see you later", "good night", "bye bye", "that is all",
      "farewell", "see you tomorrow", "bye for now")),
)  # fmt: skip


def talk(rng: random.Random, _: Phrasings) -> Draft:
    family, answer, openings = rng.choice(_TALK)
    opening = rng.choice(openings)
    if rng.random() < 0.25:
        opening = f"{rng.choice(('please', 'ok', 'so', 'well', 'hey'))}, {opening}"
    if rng.random() < 0.25:
        opening = f"{opening}, {rng.choice(('pocket', 'friend', 'buddy', 'my friend', 'please'))}"
    if rng.random() < 0.6:
        opening = opening[0].upper() + opening[1:]
    prompt = opening + rng.choice(("", "", ".", "!", "?"))
    return Draft(family, 1, prompt, answer, answer)


KINDS = (Kind("talk", talk, grade="exact", weight=0.5),)
