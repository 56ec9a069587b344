"""Fields about people, firms and places."""

from tools.bundled_models import values, words
from tools.bundled_models.fields import Field, field, string_field

FIELDS: dict[str, Field] = {
    "person": string_field(
        "name full_name customer customer_name client contact_name person user",
        "client_name person_name user_name",
        "Name|Full name|Customer|Client|Contact",
        "The name is {}.|My name is {}.|This is {}.|It concerns {}.|Please note {} as the contact."
        "|I am {}.|The client is called {}.",
        words.full_name,
    ),
    "email": string_field(
        "email email_address mail e_mail contact_email customer_email",
        "mail_address client_email",
        "Email|E-mail|Mail|Email address",
        "The email is {}.|Write to {}.|Reach out via {}.|Mail: {}.|Mail should go to {}.",
        words.email,
    ),
    "phone": field(
        "phone phone_number telephone tel mobile contact_phone customer_phone",
        "telephone_number mobile_phone client_phone",
        "Phone|Tel|Telephone|Mobile|Phone number",
        "The phone number is {}.|Call {}.|Ring {} for questions.|Dial {}."
        "|By telephone: {}.|The number to call is {}.",
        values.phone,
    ),
    "company": string_field(
        "company company_name employer organization firm business",
        "firm_name business_name",
        "Company|Firm|Employer|Organization",
        "The company is {}.|It is for {}.|The firm is called {}.|They represent {}."
        "|The business in question is {}.",
        words.company,
    ),
    "role": field(
        "role job_title position job occupation",
        "job_role title_of_job",
        "Role|Job title|Position|Job",
        "The role is {}.|The job title is {}.|The position is {}.|Works as {}.|Employed as {}.",
        values.one_of(words.ROLES),
    ),
    "age": field(
        "age age_years years_old",
        "age_in_years",
        "Age",
        "Aged {}.|{} years old.|The age is {}.|Age now: {}.",
        values.integer(18, 95),
    ),
    "birthday": field(
        "birthday birth_date date_of_birth born",
        "birthdate birth_day",
        "Born|Birthday|Date of birth",
        "Born on {}.|The birthday is {}.|Date of birth: {}.|The date of birth is {}.",
        values.date,
    ),
    "city": string_field(
        "city town place city_name",
        "town_name home_city",
        "City|Town|Place",
        "The city is {}.|Based in {}.|Located in {}.|It is in {}.|The town is {}."
        "|The place to look is {}.",
        words.city,
    ),
    "street": string_field(
        "street street_name road street_address",
        "road_name address_street",
        "Street|Road|Street address",
        "The street is {}.|Deliver to {}.|It stands at {}.|The address is {}."
        "|The building is on {}.",
        lambda rng: (
            f"{rng.randint(1, 240)} {words.last_name(rng)} {rng.choice(words.STREETS)}"
            if rng.random() < 0.6
            else f"{words.invented(rng).capitalize()}straße {rng.randint(1, 150)}"
        ),
    ),
    "postcode": string_field(
        "zip zip_code postal_code postcode",
        "postal zip_postal_code",
        "Zip|Postcode|Postal code|ZIP code",
        "The postcode is {}.|The zip code is {}.|Zip: {}.|The postal code reads {}.",
        lambda rng: words.digits(rng, 5),
    ),
    "country": field(
        "country country_name nation",
        "home_country",
        "Country|Nation",
        "The country is {}.|It lies in {}.|Country: {}.|The nation is {}.",
        values.one_of(
            words.table(
                "Germany France Spain Italy Austria Norway Sweden Finland Poland Greece Ireland "
                "Japan Canada Brazil Chile Kenya Ghana India Vietnam Portugal Denmark Iceland Peru"
            )
        ),
    ),
    "manager": string_field(
        "manager supervisor boss agent sales_rep responsible",
        "manager_name agent_name",
        "Manager|Agent|Supervisor|Responsible",
        "The manager is {}.|{} is the agent.|The supervisor is {}.|{} is responsible."
        "|Managed by {}.",
        words.full_name,
    ),
    "skills": field(
        "skills skill_list abilities expertise",
        "skill_set",
        "Skills|Expertise|Abilities",
        "Skills: {}.|Knows {}.|Good at {}.|The skills are {}.|Brings skills in {}.",
        values.listing(lambda rng: rng.choice(words.SKILLS)),
    ),
    "salary": field(
        "salary pay yearly_salary annual_pay",
        "annual_salary yearly_pay",
        "Salary|Pay|Annual salary",
        "The salary is {}.|The pay is {}.|It pays {} a year.|Annual pay: {}.",
        values.money,
    ),
    "remote": field(
        "remote is_remote remote_work work_from_home",
        "remote_ok",
        "Remote",
        "",
        values.flag(
            ("Remote work is possible.", "This is fully remote.", "Work from home."),
            ("On site only.", "Remote work is not possible.", "This is not remote."),
        ),
    ),
    "member": field(
        "member is_member vip premium_member",
        "is_vip_member",
        "Member",
        "",
        values.flag(
            ("A member of the club.", "Already a member.", "Has been a member for long."),
            ("Not a member.", "Not yet a member.", "The membership has ended."),
        ),
    ),
}
