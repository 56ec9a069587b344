"""Receipts: a shop, what was bought, and what it came to."""

import random

from tools.bundled_models import values, words
from tools.bundled_models.values import Schema, Value
from tools.drawn_documents.flow import Flow
from tools.drawn_documents.page import Page
from tools.drawn_documents.printed import (
    Said,
    answer,
    company,
    key,
    money,
    printed,
    rows_of,
    string,
)

_SHOP = ("shop", "store", "merchant", "vendor", "seller", "shop_name", "company")
_DATE = ("date", "day", "purchase_date", "date_of_purchase", "issued")
_TIME = ("time", "purchase_time", "clock")
_NUMBER = ("receipt", "number", "receipt_number", "receipt_id", "id", "reference")
_ITEMS = ("items", "lines", "positions", "articles", "products")
_NAME = ("name", "item", "product", "article", "description")
_COUNT = ("quantity", "qty", "count", "pieces")
_PRICE = ("price", "amount", "cost", "line_total", "total")
_TOTAL = ("total", "total_amount", "sum", "amount", "grand_total", "total_price")
_TAX = ("tax", "vat", "tax_amount", "vat_amount")
_PAYMENT = ("payment", "paid_by", "payment_method", "method")
_MEANS = ("Cash", "Card", "Visa", "Voucher", "Debit")


def draw_receipt(rng: random.Random, page: Page) -> tuple[dict[str, object], Schema]:
    """Draw one; return what it says and the schema of that."""
    flow = Flow.anywhere(rng, page, 42)
    said: Said = {}
    _head(rng, flow, said)
    rows = [_row(rng) for _ in range(rng.randint(1, 5))]
    said[key(rng, _ITEMS)] = _items(rng, flow, rows)
    flow.rule()
    _sums(rng, flow, said, sum(round(float(price.json) * 100) for *_, price in rows))
    if rng.random() < 0.4:
        flow.line(rng.choice(("Thank you!", "Have a nice day", "Goodbye")), "m")
    return answer(rng, said)


def _head(rng: random.Random, flow: Flow, said: Said) -> None:
    shop = company(rng)
    flow.line(shop.text, rng.choice("lmm"), rng.randint(0, 5))
    said[key(rng, _SHOP)] = shop
    if rng.random() < 0.3:
        number = printed(rng, values.string(words.code))
        shape = rng.choice(("Receipt {}", "No. {}", "Receipt no. {}", "# {}"))
        flow.line(shape.format(number.text), rng.choice("lm"))
        said[key(rng, _NUMBER)] = number
    if rng.random() < 0.7:
        date = values.date(rng)
        said[key(rng, _DATE)] = date
        if rng.random() < 0.5:
            time = values.clock(rng)
            said[key(rng, _TIME)] = time
            flow.pair(date.text, time.text)
        else:
            flow.line(rng.choice(("{}", "Date: {}")).format(date.text), rng.choice("lmr"))


def _row(rng: random.Random) -> tuple[Value, int, Value]:
    name = printed(rng, values.string(words.product), 20)
    cents = rng.randint(50, rng.choice((2_000, 20_000)))
    return name, rng.randint(1, rng.choice((4, 30))), money(cents - cents % rng.choice((1, 5, 10)))


def _items(rng: random.Random, flow: Flow, rows: list[tuple[Value, int, Value]]) -> Value:
    shape = rng.choice(("{1}", "{0} x {1}", "{0} {1}", "{1} x{0}"))
    name, count, price = (key(rng, keys) for keys in (_NAME, _COUNT, _PRICE))
    found = []
    for product, pieces, cost in rows:
        flow.pair(shape.format(pieces, product.text), cost.text)
        row = {name: product, count: Value(str(pieces), pieces, {"type": "integer"}), price: cost}
        if "{0}" not in shape:
            del row[count]
        found.append(row)
    return rows_of(found)


def _sums(rng: random.Random, flow: Flow, said: Said, cents: int) -> None:
    if rng.random() < 0.4:
        tax = money(cents * rng.choice((5, 7, 19, 20)) // 100)
        flow.pair(rng.choice(("Tax", "VAT", "incl. VAT")), tax.text)
        said[key(rng, _TAX)] = tax
    sign = rng.choice(("{}", "{}", "${}", "{} EUR", "USD {}"))
    total = money(cents, sign.format(f"{cents / 100:.2f}"))
    flow.pair(rng.choice(("Total", "TOTAL", "Sum", "Amount due")), total.text, rng.randint(0, 2))
    said[key(rng, _TOTAL)] = total
    if rng.random() < 0.4:
        means = string(rng.choice(_MEANS))
        flow.pair(rng.choice(("Paid by", "Payment", "Paid")), means.text)
        said[key(rng, _PAYMENT)] = means
