"""Filler words: they vary the wording of training texts so that no template is learnt by heart."""

import random

from tools.bundled_models import words

FILLER_SHARE = 0.5  # share of the training sentences that get filler words
_WORDS = words.table(
    "the a an of to in on at for with by from as about into over after before under than less more "
    "most some any all both each other such only own same so too very just also now then "
    "here there "
    "again once still even ever never always often soon later today perhaps maybe indeed really "
    "quite rather almost exactly actually basically kindly please thanks hello hi well "
    "okay and but "
    "or if because while until since though that this these those which who what where "
    "when why how "
    "i you he she it we they me him her us them my your his its our their is are was were be been "
    "being am do does did done have has had having will would shall should can could may "
    "might must "
    "want need like love hope think know see look find get got give take make made put "
    "set keep let "
    "tell say said ask call hear listen show move go going come came leave stay turn run use try "
    "help work play read write send bring hold carry list name new old good great nice fine last "
    "next first second few many much one thing things way day time place person people team group "
    "number word words point part case fact side end start back up down out off away around new "
    "another yet something anything everything someone anyone everyone next seen known used called "
    "given taken named listed noted shown found kept said told asked looking going getting making"
)


def disturb(rng: random.Random, template: str) -> str:
    """Insert one to four filler words into a template, never inside a `{...}` slot."""
    if rng.random() >= FILLER_SHARE:
        return template
    parts = template.split(" ")
    for _ in range(rng.randint(1, 4)):
        parts.insert(rng.randint(0, len(parts) - 1), _word(rng))
    if rng.random() < 0.4:
        # A word behind the last slot shows where a value ends without a full stop.
        last, stop = (parts[-1][:-1], ".") if parts[-1].endswith(".") else (parts[-1], "")
        parts[-1:] = [last, _word(rng) + stop]
    text = " ".join(parts)
    return text[0].upper() + text[1:] if rng.random() < 0.7 and text[0] != "{" else text


def around_label(rng: random.Random, label: str) -> str:
    """Return a sentence that holds nothing but filler words, the label and the value."""
    before = [_word(rng) for _ in range(rng.randint(0, 3))]
    between = [_word(rng) for _ in range(rng.randint(0, 2))]
    text = " ".join([*before, label.lower(), *between, "{}."])
    return text[0].upper() + text[1:]


def _word(rng: random.Random) -> str:
    return rng.choice(_WORDS) if rng.random() < 0.8 else words.invented(rng, 1, 2)
