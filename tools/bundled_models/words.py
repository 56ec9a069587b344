"""Words, names and codes that the value samplers draw from.

Most names are put together from syllables or random characters, so a model that
answers correctly has copied the value from the prompt; it cannot have memorised it.
"""

import random


def table(text: str, separator: str | None = None) -> list[str]:
    """Return the words of `text`."""
    return text.split(separator)


_FIRST = table(
    "Ada Alan Grace Edsger Barbara Linus Maria Jonas Priya Wei Fatima Kofi Yuki Lars Chloé Zoë "
    "Björn Anna Omar Elena Diego Ingrid Noah Mia Leon Emma Paul Laura Felix Nina Tom Sara "
    "Jane John "
    "Peter Alice Bob Carol David Eva Frank Greta Hans Irene Julia Karl Lena Marta Nils Olga Rosa "
    "Stefan Theo Uma Viktor Wanda Xavier Yara Zane Sofía Renée Jürgen"
)
_LAST = table(
    "Lovelace Turing Hopper Dijkstra Liskov Torvalds Schmidt Müller Garcia Patel Chen "
    "Okafor Tanaka "
    "Larsen Dubois Novak Rossi Silva Kim Nguyen Brown Smith Miller Wilson Moore Taylor Anderson "
    "Jackson White Harris Martin Thompson Weber Fischer Becker Hoffmann Schäfer Koch Richter Wolf "
    "Ivanova Haddad Mensah Berg Lindqvist Kowalski Costa Ferrari Moreau Young Hill Green "
    "Baker Nelson"
)
_CITIES = table(
    "Berlin Hamburg Munich Cologne Paris Lyon Madrid Lisbon Rome Milan Vienna Zurich Oslo "
    "Stockholm "
    "Helsinki Warsaw Prague Budapest Athens Dublin London Leeds Boston Chicago Denver "
    "Austin Seattle "
    "Toronto Tokyo Osaka Seoul Mumbai Delhi Nairobi Lagos Cairo Sydney Auckland Lima Bogotá"
)
NOUNS = table(
    "lamp desk chair bottle notebook keyboard mouse monitor cable charger backpack jacket "
    "kettle mug "
    "blender speaker headset tripod camera router tablet printer folder marker stapler "
    "pillow blanket "
    "towel candle mirror clock shelf drawer ladder hammer drill wrench bucket broom hose "
    "helmet glove "
    "scarf sandal boot racket puzzle kite tent stove cooler lantern compass map whistle "
    "flute guitar"
)
ADJECTIVES = table(
    "red blue green black white grey wooden steel ceramic leather cotton foldable "
    "wireless portable "
    "compact heavy light vintage modern solar electric manual digital large small round "
    "square soft "
    "waterproof ergonomic adjustable insulated magnetic silent classic premium basic organic"
)
TOPICS = table(
    "login page|payment gateway|search index|user profile|export job|mobile app|password reset|"
    "data import|weekly report|order form|mail server|backup script|image upload|checkout flow|"
    "user settings|invoice list|chat widget|audit log|release build|cache layer|sales dashboard|"
    "onboarding guide|budget plan|marketing site|team calendar|test suite|price table|map view",
    "|",
)
PROBLEMS = table(
    "crashes on start|is very slow|shows a blank screen|returns the wrong total|does not load|"
    "sends duplicate mails|loses its settings|times out|rejects valid input|ignores the filter|"
    "fails after the update|prints garbled text|needs a review|must be rewritten|leaks memory",
    "|",
)
EVENTS = table(
    ""
    "workshop|meetup|review|stand-up|lecture|concert|training|hackathon|breakfast|reception|webinar|"
    "demo day|book club|planning session|panel discussion|garden party|open day|retrospective",
    "|",
)
SKILLS = table(
    "python rust go java sql docker linux react kubernetes excel design writing sales testing "
    "statistics german english french spanish marketing accounting welding cooking teaching"
)
TAGS = table(
    "urgent new sale backend frontend billing api mobile legacy beta internal external security ui "
    "docs infra gift outdoor kitchen office travel summer winter kids sport music garden eco bulk"
)
ROLES = table(
    "engineer|designer|project manager|accountant|sales lead|teacher|nurse|architect|data analyst|"
    "editor|consultant|developer|researcher|office manager|electrician|chef|librarian|pilot",
    "|",
)
SERVICES = table(
    "auth billing search gateway mailer scheduler storage frontend worker cache ingest"
)
STREETS = table("Street|Road|Avenue|Lane|Square|Way|Court|Drive", "|")
GENRES = table("jazz rock techno classical folk pop blues ambient metal funk soul reggae")
_ONSETS = table("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w y z")
_VOWELS = table("a e i o u ai ea ie oo ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "ck", "nd", "rt", "x", "ng", "lm"]
_DOMAINS = table("example.com example.org mail.test firma.de posteo.de uni.edu shop.io corp.net")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_ALNUM = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"


def invented(rng: random.Random, shortest: int = 2, longest: int = 3) -> str:
    """Return an invented lower-case word of `shortest` to `longest` syllables."""
    count = rng.randint(shortest, longest)
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count)
    )


def first_name(rng: random.Random) -> str:
    """Return a first name, more often invented than real."""
    return rng.choice(_FIRST) if rng.random() < 0.4 else invented(rng, 1, 3).capitalize()


def last_name(rng: random.Random) -> str:
    """Return a family name, more often invented than real."""
    name = rng.choice(_LAST) if rng.random() < 0.35 else invented(rng).capitalize()
    draw = rng.random()
    if draw < 0.03:
        return "O'" + name
    return f"{name}-{rng.choice(_LAST)}" if draw < 0.07 else name


def full_name(rng: random.Random) -> str:
    """Return first and family name, at times with a title or a middle initial."""
    draw = rng.random()
    middle = f" {rng.choice(_ALPHABET).upper()}." if draw < 0.06 else ""
    title = rng.choice(("Dr. ", "Prof. ")) if draw > 0.95 else ""
    return f"{title}{first_name(rng)}{middle} {last_name(rng)}"


def city(rng: random.Random) -> str:
    """Return the name of a real or invented town."""
    if rng.random() < 0.5:
        return rng.choice(_CITIES)
    return invented(rng).capitalize() + rng.choice(("", "", "burg", "ville", " Bay", " Hills"))


def company(rng: random.Random) -> str:
    """Return the name of an invented firm."""
    stem = invented(rng).capitalize() if rng.random() < 0.7 else rng.choice(_LAST)
    ending = rng.choice(
        ("", " GmbH", " Ltd", " Inc", " AG", " Labs", " & Co", " Systems", " Foods")
    )
    return stem + ending


def email(rng: random.Random) -> str:
    """Return an e-mail address."""
    a, b = first_name(rng), last_name(rng)
    shape = rng.randrange(5)
    local = (f"{a}.{b}", f"{a[0]}.{b}", f"{a}{rng.randrange(100)}", f"{b}_{a}", invented(rng))[
        shape
    ]
    local = local.lower().replace("'", "")
    ascii_local = local.encode("ascii", "ignore").decode().strip("._-") or "info"
    domain = (
        rng.choice(_DOMAINS)
        if rng.random() < 0.4
        else invented(rng) + rng.choice((".com", ".org", ".net", ".de", ".io", ".co.uk", ".test"))
    )
    return f"{ascii_local}@{domain}"


def digits(rng: random.Random, count: int) -> str:
    """Return `count` random decimal digits."""
    return "".join(rng.choice("0123456789") for _ in range(count))


def code(rng: random.Random) -> str:
    """Return an identifier such as ORD-48213, X7K2P or inv/2024/118."""
    shape = rng.randrange(6)
    letters = "".join(rng.choice(_ALPHABET) for _ in range(rng.randint(2, 4)))
    if shape < 2:
        return f"{letters.upper()}-{digits(rng, rng.randint(2, 6))}"
    if shape == 2:
        return "".join(rng.choice(_ALNUM) for _ in range(rng.randint(4, 8)))
    if shape == 3:
        return f"{letters}/{rng.randint(2019, 2031)}/{digits(rng, 3)}"
    if shape == 4:
        return f"{letters.upper()}{digits(rng, rng.randint(3, 5))}"
    return f"{letters}_{digits(rng, 2)}{rng.choice(_ALPHABET)}"


def product(rng: random.Random) -> str:
    """Return the name of a product."""
    noun = rng.choice(NOUNS) if rng.random() < 0.75 else invented(rng)
    draw = rng.random()
    if draw < 0.35:
        return noun
    if draw < 0.85:
        return f"{rng.choice(ADJECTIVES)} {noun}"
    return f"{invented(rng).capitalize()} {noun}"


def phrase(rng: random.Random) -> str:
    """Return a short phrase of ordinary words."""
    shape = rng.randrange(4)
    if shape == 0:
        return f"{rng.choice(TOPICS)} {rng.choice(PROBLEMS)}"
    if shape == 1:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} for {first_name(rng)}"
    if shape == 2:
        return f"{rng.choice(TOPICS)} {rng.choice(EVENTS)}"
    verb, name = rng.choice(("call", "visit", "ask", "pay", "thank")), first_name(rng)
    return f"{verb} {name} {rng.choice(('about', 'for'))} the {rng.choice(NOUNS)}"
