"""Domains: which fields can occur together, and how a text about them opens."""

from dataclasses import dataclass

from tools.bundled_models import commerce, people, technical
from tools.bundled_models.fields import Field

FIELDS: dict[str, Field] = {**people.FIELDS, **commerce.FIELDS, **technical.FIELDS}


@dataclass(frozen=True)
class Domain:
    """A subject: the names of its fields and its opening sentences (the last is held out)."""

    fields: tuple[str, ...]
    openings: tuple[str, ...]


def _domain(fields: str, openings: str) -> Domain:
    return Domain(tuple(fields.split()), tuple(openings.split("|")))


DOMAINS: dict[str, Domain] = {
    "contact": _domain(
        "person email phone company role age birthday city street postcode country member",
        "New contact from the fair.|Please add this contact.|Hello,|Business card:|We met today."
        "|A new person for the address book.",
    ),
    "event": _domain(
        "title day time venue organizer attendees capacity price remote city note",
        "You are invited.|Save the date!|Event news:|Please announce this.|Hi all,"
        "|Something new for the calendar.",
    ),
    "order": _domain(
        "order_id person items total currency status paid express street city postcode phone email",
        "New order.|An order came in.|Order confirmation|Hello, I would like to order."
        "|Thanks for your purchase.|Yet another order for the warehouse.",
    ),
    "product": _domain(
        "product sku price currency stock rating color weight tags vendor quantity",
        "New in the shop.|Product sheet|For the catalog:|Stock update.|Please list this."
        "|One more article for the catalog.",
    ),
    "ticket": _domain(
        "ticket_id summary person email priority assignee service version tags resolved note",
        "New ticket.|Support request|A user writes:|Bug report|Help needed."
        "|One more case for the help desk.",
    ),
    "invoice": _domain(
        "invoice_id issued due vendor person total tax currency paid iban items",
        "Invoice|Please find the invoice below.|Payment reminder|Accounting:|Dear customer,"
        "|One more bill for the accounting team.",
    ),
    "log": _domain(
        "day time level service host status_code latency version note",
        "Log entry|From the log:|Monitoring alert.|Trace:|Server message.|One more line of "
        "the log.",
    ),
    "travel": _domain(
        "person origin destination day time passengers travel_class price currency status paid",
        "Booking request|Trip details:|Travel plan.|Your ticket|I want to travel."
        "|One more trip for the travel desk.",
    ),
    "job": _domain(
        "role company city country salary remote skills manager email phone",
        "Job offer|We are hiring!|Open position:|Vacancy|Join us."
        "|One more vacancy for the job board.",
    ),
    "reading": _domain(
        "sensor day time temperature humidity condition city status_code",
        "Sensor report|Weather report|Reading:|Station log|Measured today."
        "|One more reading from the station.",
    ),
    "staff": _domain(
        "person role company manager email phone salary birthday skills remote city",
        "New colleague.|Staff record|Personnel file:|Please welcome our new hire.|HR note."
        "|One more person joins the team.",
    ),
    "transfer": _domain(
        "person iban total currency issued note vendor email",
        "Bank transfer|Please send money.|Payment order:|Transfer request.|Standing order."
        "|One more payment for the bank.",
    ),
}
