"""Fields about events, travel, logs, tickets and measurements."""

import random

from tools.bundled_models import values, words
from tools.bundled_models.fields import Field, field, string_field


def _title(rng: random.Random) -> str:
    name = rng.choice(words.EVENTS)
    return rng.choice(
        (
            f"{words.invented(rng).capitalize()} {name}",
            f"{rng.choice(words.SKILLS)} {name}",
            f"{rng.choice(words.TOPICS)} {name}",
            f"{rng.choice(words.ADJECTIVES)} {name}".capitalize(),
        )
    )


def _address(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(256)) for _ in range(4))


_HALLS = ("Hall", "Park", "Hotel", "Café", "Library", "Center")

FIELDS: dict[str, Field] = {
    "title": string_field(
        "title event name event_name subject",
        "event_title name_of_event",
        "Title|Event|Subject",
        "The event is the {}.|Join the {}.|We plan the {}.|It is called {}.|The title is {}."
        "|The event carries the title {}.",
        _title,
    ),
    "day": field(
        "date day event_date on when",
        "date_of_event event_day",
        "Date|Day|When",
        "The date is {}.|It takes place on {}.|It is on {}.|Set for {}.|The day is {}."
        "|The day of the event is {}.",
        values.date,
    ),
    "time": field(
        "time start_time start begins_at",
        "event_time time_of_start",
        "Time|Start|Begins",
        "It starts at {}.|The time is {}.|We begin at {}.|Be there at {}.|The start is at {}.",
        values.clock,
    ),
    "venue": string_field(
        "location venue place where room",
        "event_location event_place",
        "Location|Venue|Where|Room",
        "The venue is {}.|We meet in {}.|It takes place at {}.|Location: {}.|The room is {}."
        "|The event place is {}.",
        lambda rng: (
            rng.choice((f"Room {rng.randint(1, 400)}", f"Hall {rng.choice('ABCDEF')}"))
            if rng.random() < 0.4
            else f"{rng.choice((words.last_name, words.city))(rng)} {rng.choice(_HALLS)}"
        ),
    ),
    "organizer": string_field(
        "organizer host speaker contact organized_by",
        "host_name organizer_name",
        "Organizer|Host|Speaker",
        "Organized by {}.|The host is {}.|{} will speak.|{} is the organizer.|Hosted by {}.",
        words.full_name,
    ),
    "attendees": field(
        "attendees participants guests people invited",
        "guest_list participant_names",
        "Attendees|Participants|Guests",
        "The attendees are {}.|With {}.|Guests: {}.|{} will come.|Invited: {}.|The guest list: {}.",
        values.listing(
            lambda rng: words.first_name(rng) if rng.random() < 0.6 else words.full_name(rng)
        ),
    ),
    "capacity": field(
        "capacity seats max_guests places",
        "seat_count guest_capacity",
        "Capacity|Seats|Places",
        "There are {} seats.|The capacity is {}.|Room for {} guests.|{} places are open."
        "|Seats for {} people.",
        values.integer(2, 3000),
    ),
    "level": field(
        "level log_level severity",
        "severity_level",
        "Level|Severity",
        "The level is {}.|Logged as {}.|Severity: {}.|The severity is {}.",
        values.enum("debug", "info", "warning", "error", "critical"),
    ),
    "service": field(
        "service component module source",
        "service_name module_name",
        "Service|Component|Module",
        "The service is {}.|It comes from {}.|Component: {}.|Seen in {}.|The module is {}.",
        values.one_of(words.SERVICES),
    ),
    "host": string_field(
        "ip ip_address host address",
        "host_ip source_ip",
        "IP|Host|Address",
        "The IP is {}.|From host {}.|The address is {}.|Host IP: {}.",
        _address,
    ),
    "status_code": field(
        "status_code code error_code http_status",
        "http_code",
        "Code|Status code|Error code",
        "The status code is {}.|It returned {}.|Error code {}.|The code sent back: {}.",
        values.integer(100, 599),
    ),
    "latency": field(
        "latency_ms duration_ms latency duration took_ms",
        "duration_in_ms latency_in_ms",
        "Latency|Duration|Took",
        "It took {} ms.|The latency was {} ms.|Duration: {} ms.|It ran for {} ms.",
        values.decimal(0.1, 3000),
    ),
    "ticket_id": string_field(
        "ticket_id ticket issue_id id case_number",
        "ticket_number issue_number",
        "Ticket|Ticket ID|Issue|Case",
        "Ticket {}.|The ticket is {}.|Issue {}.|Filed as {}.|The number of the ticket is {}.",
        words.code,
    ),
    "summary": string_field(
        "summary description title problem issue",
        "problem_description issue_summary",
        "Summary|Problem|Description",
        "The problem: {}.|Summary: {}.|In short: {}.|They report: {}.|The issue is: {}.",
        lambda rng: f"{rng.choice(words.TOPICS)} {rng.choice(words.PROBLEMS)}",
    ),
    "priority": field(
        "priority urgency importance prio",
        "priority_level urgency_level",
        "Priority|Urgency",
        "The priority is {}.|Urgency: {}.|Priority {}.|Treat it as {} priority.|Its urgency is {}.",
        values.enum("low", "medium", "high", "urgent", "critical"),
    ),
    "assignee": string_field(
        "assignee assigned_to owner handled_by",
        "owner_name assignee_name",
        "Assignee|Owner|Assigned to",
        "Assigned to {}.|{} takes care of it.|The owner is {}.|{} will handle it."
        "|The assignee is {}.",
        words.full_name,
    ),
    "resolved": field(
        "resolved is_resolved closed fixed done",
        "is_fixed is_closed",
        "Resolved",
        "",
        values.flag(
            ("It is resolved.", "This has been fixed.", "The case is closed."),
            ("It is not resolved.", "This is still open.", "Nobody has fixed it yet."),
        ),
    ),
    "version": string_field(
        "version release app_version software_version",
        "version_number release_version",
        "Version|Release",
        "The version is {}.|Seen in version {}.|Running release {}.|Version number: {}.",
        lambda rng: f"{rng.randint(0, 14)}.{rng.randint(0, 30)}.{rng.randint(0, 40)}",
    ),
    "origin": string_field(
        "from origin departure departure_city from_city",
        "origin_city city_of_departure",
        "From|Origin|Departure",
        "It leaves from {}.|Departing from {}.|The trip starts in {}.|Origin: {}."
        "|The city of departure is {}.",
        words.city,
    ),
    "destination": string_field(
        "to destination arrival arrival_city to_city",
        "destination_city city_of_arrival",
        "To|Destination|Arrival",
        "It goes to {}.|The destination is {}.|Arriving in {}.|Bound for {}."
        "|The city of arrival is {}.",
        words.city,
    ),
    "passengers": field(
        "passengers travelers people seats passenger_count",
        "traveler_count number_of_passengers",
        "Passengers|Travelers",
        "For {} passengers.|{} people travel.|There are {} travelers.|The passengers number {}.",
        values.integer(1, 9),
    ),
    "travel_class": field(
        "class travel_class cabin cabin_class",
        "ticket_class",
        "Class|Cabin",
        "In {} class.|The class is {}.|Cabin: {}.|They fly {}.",
        values.enum("economy", "business", "first", "premium"),
    ),
    "temperature": field(
        "temperature temp temperature_c degrees",
        "temperature_celsius temp_celsius",
        "Temperature|Temp",
        "The temperature is {}.|It is {} now.|Measured {}.|It reads {}.",
        values.decimal(-25, 45, 1, " °C"),
    ),
    "humidity": field(
        "humidity humidity_percent relative_humidity",
        "percent_humidity",
        "Humidity",
        "The humidity is {} percent.|Humidity: {} %.|Air humidity of {} %.|{} % humidity.",
        values.integer(5, 100),
    ),
    "condition": field(
        "condition weather sky",
        "weather_condition",
        "Condition|Weather|Sky",
        "It is {}.|The weather is {}.|The sky is {}.|Weather: {}.",
        values.enum("sunny", "cloudy", "rainy", "snowy", "windy", "foggy"),
    ),
    "sensor": string_field(
        "sensor sensor_id device device_id",
        "device_name sensor_name",
        "Sensor|Device|Sensor ID",
        "Sensor {}.|The device is {}.|Reported by {}.|Device ID {}.|The sensor is called {}.",
        words.code,
    ),
}
