"""Sentences that state several fields at once, the way people write about them."""

import random
import re
from collections.abc import Mapping
from typing import NamedTuple

from tools.bundled_models.filler import disturb

COMPOUND_SHARE = 0.4  # share of the documents that hold one, where their fields allow it
_SLOT = re.compile(r"{(\w+)}")

# In each group the last sentence is held out.
GROUPS: tuple[tuple[str, ...], ...] = (
    (
        "Please call {person} at {phone}.",
        "{person} can be reached at {phone}.",
        "You can call {person} under {phone}.",
        "{person}, phone {phone}",
        "{person} ({phone})",
        "Ask for {person}, the number is {phone}.",
    ),
    (
        "Please write to {person} at {email}.",
        "{person} can be reached at {email}.",
        "{person} <{email}>",
        "Contact: {person}, {email}",
        "{person} ({email})",
        "Mail {person} under {email}.",
    ),
    (
        "Please call {person} at {phone} or write to {email}.",
        "{person} can be reached at {email} or {phone}.",
        "{person} can be reached under {phone} and {email}.",
        "{person} ({email}, {phone})",
        "{person}, {phone}, {email}",
        "Hi, this is {person}. My email is {email} and my phone number is {phone}.",
        "My name is {person}, call me at {phone} or send a mail to {email}.",
        "For questions ask {person}: {phone}, or by mail {email}.",
    ),
    (
        "{person} works at {company}.",
        "{person} from {company} asked for a call.",
        "I met {person} of {company}.",
        "{person}, {company}",
        "{company} is represented by {person}.",
    ),
    (
        "{person} is a {role} at {company}.",
        "{person}, {role} at {company}, wrote to us.",
        "{company} hired {person} as {role}.",
        "As {role} of {company}, {person} takes care of it.",
    ),
    (
        "{person} lives in {city}.",
        "{person} from {city} called.",
        "We visited {person} in {city}.",
        "{city} is where {person} lives.",
    ),
    (
        "{person} is {age} years old and lives in {city}.",
        "{person}, {age}, from {city}",
        "{person} ({age}) comes from {city}.",
        "In {city} we met {person}, aged {age}.",
    ),
    (
        "{quantity} x {product} for {price}",
        "{product}, {quantity} pieces at {price} each.",
        "We have {quantity} of the {product} for {price}.",
        "The {product} sells for {price}, {quantity} are left.",
    ),
    (
        "The {product} costs {price}.",
        "{product} for {price}",
        "{product}: {price}",
        "You get the {product} at {price}.",
    ),
    (
        "Order {order_id} of {person} comes to {total}.",
        "{person} ordered for {total}, order {order_id}.",
        "Order {order_id}: {person}, total {total}",
        "{total} from {person} for order {order_id}.",
    ),
    (
        "{title} takes place on {day} at {time} in {venue}.",
        "{title}: {day}, {time}, {venue}",
        "Join us for {title} in {venue} on {day} at {time}.",
        "On {day} at {time} {venue} is the place for {title}.",
    ),
    (
        "Invoice {invoice_id} from {vendor}, due on {due}: {total}",
        "{vendor} sent invoice {invoice_id} over {total}, to be paid by {due}.",
        "Invoice {invoice_id} ({vendor}) comes to {total} and is due on {due}.",
        "By {due} {vendor} wants {total} for invoice {invoice_id}.",
    ),
    (
        "{person} travels from {origin} to {destination} on {day}.",
        "{person}: {origin} to {destination}, {day}",
        "A ticket for {person} from {origin} to {destination} on {day}.",
        "On {day} {person} goes from {origin} to {destination}.",
    ),
    (
        "{day} {time} {level} {service}: {note}",
        "{day} {time} [{level}] {service} - {note}",
        "{level} {day} {time} {service} {note}",
        "{service} at {time} on {day}: {level}, {note}",
    ),
)


class Compound(NamedTuple):
    """A sentence, and the fields that it states."""

    text: str
    names: frozenset[str]


def sample_compound(
    rng: random.Random, stated: Mapping[str, str], *, held: bool
) -> Compound | None:
    """A sentence about some of the ``stated`` fields (name to wording); None if none fits."""
    if rng.random() >= COMPOUND_SHARE:
        return None
    fitting = [group for group in GROUPS if _slots(group[0]) <= stated.keys()]
    if not fitting:
        return None
    # Sentences about many fields fit seldom, so they go first where they do.
    most = max(len(_slots(group[0])) for group in fitting)
    group = rng.choice([g for g in fitting if len(_slots(g[0])) == most or rng.random() < 0.3])
    if held:
        template = group[-1] if rng.random() < 0.5 else rng.choice(group[:-1])
    else:
        template = disturb(rng, rng.choice(group[:-1]))
    return Compound(template.format(**stated), frozenset(_slots(group[0])))


def _slots(template: str) -> set[str]:
    return set(_SLOT.findall(template))
