"""Fields about orders, invoices and products."""

from tools.bundled_models import values, words
from tools.bundled_models.fields import Field, field, lines, string_field

FIELDS: dict[str, Field] = {
    "order_id": string_field(
        "order_id id order_number reference order",
        "order_reference order_code",
        "Order|Order ID|Reference|Order no.",
        "The order number is {}.|Order {}.|Reference {}.|It is filed as {}.|The order code is {}.",
        words.code,
    ),
    "items": field(
        "items lines order_lines positions articles",
        "item_list order_items",
        "Items|Articles|Lines",
        "Items: {}.|Ordered: {}.|We need {}.|The basket holds {}.|The list of items: {}.",
        lines(),
    ),
    "total": field(
        "total total_price amount sum total_amount amount_due grand_total",
        "sum_total order_total",
        "Total|Amount|Sum|Grand total",
        "The total is {}.|It comes to {}.|The amount is {}.|In total {}.|The sum is {}."
        "|All together: {}.",
        values.money,
    ),
    "price": field(
        "price unit_price cost price_each item_price_net",
        "cost_each product_cost",
        "Price|Cost|Unit price",
        "The price is {}.|It costs {}.|Priced at {}.|It sells for {}.|The cost of it is {}.",
        values.money,
    ),
    "currency": field(
        "currency currency_code",
        "price_currency",
        "Currency",
        "The currency is {}.|Paid in {}.|All amounts are in {}.|Currency used: {}.",
        values.enum("EUR", "USD", "GBP", "CHF", "JPY"),
    ),
    "status": field(
        "status state order_status current_status",
        "current_state order_state",
        "Status|State",
        "The status is {}.|It is {}.|Marked as {}.|Current state: {}.|The state is now {}.",
        values.enum("pending", "shipped", "delivered", "cancelled", "returned", "in_progress"),
    ),
    "paid": field(
        "paid is_paid payment_received settled",
        "is_settled has_paid",
        "Paid",
        "",
        values.flag(
            ("It has been paid.", "Already paid.", "The payment has arrived.", "Settled in full."),
            ("It has not been paid.", "Not paid yet.", "The payment is missing.", "Still unpaid."),
        ),
    ),
    "express": field(
        "express express_delivery is_express fast_shipping",
        "express_shipping",
        "Express",
        "",
        values.flag(
            ("Send it by express.", "Express delivery, please.", "It ships express."),
            ("No express delivery.", "Standard delivery.", "Normal shipping will do."),
        ),
    ),
    "product": string_field(
        "product product_name item item_name article",
        "article_name name_of_product",
        "Product|Item|Article",
        "The product is a {}.|Product: {}.|This is the {}.|We list the {}.|The article is a {}.",
        words.product,
    ),
    "sku": string_field(
        "sku product_id item_code product_code article_number",
        "item_id article_code",
        "SKU|Item code|Product code|Article no.",
        "The SKU is {}.|Item code {}.|Listed under {}.|Product code: {}.|The article code is {}.",
        words.code,
    ),
    "stock": field(
        "stock in_stock_count units_available stock_level inventory",
        "stock_count units_in_stock",
        "Stock|Units|Inventory",
        "There are {} in stock.|{} units left.|The stock is {}.|We have {} of them."
        "|{} pieces are available.",
        values.integer(0, 5000),
    ),
    "quantity": field(
        "quantity qty count number_of_items pieces",
        "item_quantity piece_count",
        "Quantity|Qty|Count|Pieces",
        "The quantity is {}.|{} pieces.|We want {} of them.|Count: {}.|The count of pieces is {}.",
        values.integer(1, 400),
    ),
    "rating": field(
        "rating stars score average_rating",
        "star_rating rating_score",
        "Rating|Stars|Score",
        "Rated {}.|The rating is {}.|It has {} stars.|It scores {}.|The average score is {}.",
        values.decimal(0, 5),
    ),
    "color": field(
        "color colour product_color",
        "item_color",
        "Color|Colour",
        "The color is {}.|It comes in {}.|It is {} in color.|Colour: {}.|Painted {}.",
        values.enum("red", "green", "blue", "black", "white", "yellow", "purple"),
    ),
    "weight": field(
        "weight weight_kg kilograms mass",
        "weight_in_kg product_weight",
        "Weight|Mass",
        "It weighs {}.|The weight is {}.|Weight: {}.|The mass is {}.",
        values.decimal(0.1, 90, 2, " kg"),
    ),
    "tags": field(
        "tags labels keywords categories",
        "tag_list label_list",
        "Tags|Labels|Keywords",
        "Tags: {}.|Tagged {}.|Labels: {}.|Filed under {}.|The keywords are {}.",
        values.listing(lambda rng: rng.choice(words.TAGS)),
    ),
    "vendor": string_field(
        "vendor seller supplier vendor_name issuer",
        "supplier_name seller_name",
        "Vendor|Seller|Supplier|Issuer",
        "The vendor is {}.|Sold by {}.|The supplier is {}.|Issued by {}.|{} is the seller.",
        words.company,
    ),
    "invoice_id": string_field(
        "invoice_number invoice_id invoice number invoice_no",
        "invoice_reference invoice_code",
        "Invoice|Invoice no.|Invoice number",
        "Invoice {}.|The invoice number is {}.|This is invoice {}.|Invoice no. {}."
        "|The invoice carries the number {}.",
        words.code,
    ),
    "issued": field(
        "date invoice_date issue_date issued issued_on",
        "date_issued date_of_issue",
        "Date|Issued|Issue date",
        "Issued on {}.|The invoice date is {}.|Dated {}.|It was issued on {}."
        "|The date of issue is {}.",
        values.date,
    ),
    "due": field(
        "due_date due deadline payment_due due_by",
        "due_on date_due",
        "Due|Due date|Deadline",
        "Due on {}.|Please pay by {}.|The due date is {}.|The deadline is {}.|It must be paid "
        "by {}.",
        values.date,
    ),
    "tax": field(
        "tax vat tax_amount vat_amount",
        "tax_sum",
        "Tax|VAT",
        "The tax is {}.|VAT: {}.|It includes {} of tax.|Tax amounts to {}.",
        values.money,
    ),
    "iban": string_field(
        "iban account account_number bank_account",
        "iban_number account_iban",
        "IBAN|Account|Bank account",
        "The account is {}.|IBAN {}.|Transfer it to {}.|The IBAN reads {}.",
        lambda rng: rng.choice(("DE", "FR", "ES", "AT", "NL")) + words.digits(rng, 18),
    ),
    "note": string_field(
        "note comment remark memo message",
        "comment_text remark_text",
        "Note|Comment|Remark|Memo",
        'Note: {}.|The comment says "{}".|Remark: {}.|They add: {}.|A remark was left: {}.',
        words.phrase,
    ),
}
HELD_LINES = lines(held=True)
