"""Facts to remember: a small world atlas, and questions that chain two of its facts.

The atlas is common knowledge; questions cover all its countries equally.
"""

from __future__ import annotations

import random

from .kind import Draft, Kind, Phrasings, worked

# Rows of country, capital, currency and continent.
ATLAS: tuple[tuple[str, str, str, str], ...] = tuple(
    tuple(line.split("|"))  # type: ignore[misc]
    for line in """
United States|Washington|dollar|North America
China|Beijing|yuan|Asia
India|New Delhi|rupee|Asia
Japan|Tokyo|yen|Asia
Germany|Berlin|euro|Europe
United Kingdom|London|pound|Europe
France|Paris|euro|Europe
Italy|Rome|euro|Europe
Brazil|Brasilia|real|South America
Canada|Ottawa|dollar|North America
Russia|Moscow|ruble|Europe
Spain|Madrid|euro|Europe
Mexico|Mexico City|peso|North America
Australia|Canberra|dollar|Oceania
South Korea|Seoul|won|Asia
Indonesia|Jakarta|rupiah|Asia
Turkey|Ankara|lira|Asia
Netherlands|Amsterdam|euro|Europe
Switzerland|Bern|franc|Europe
Poland|Warsaw|zloty|Europe
Sweden|Stockholm|krona|Europe
Belgium|Brussels|euro|Europe
Argentina|Buenos Aires|peso|South America
Norway|Oslo|krone|Europe
Austria|Vienna|euro|Europe
Egypt|Cairo|pound|Africa
Thailand|Bangkok|baht|Asia
Ireland|Dublin|euro|Europe
Israel|Jerusalem|shekel|Asia
Nigeria|Abuja|naira|Africa
South Africa|Pretoria|rand|Africa
Denmark|Copenhagen|krone|Europe
Philippines|Manila|peso|Asia
Vietnam|Hanoi|dong|Asia
Malaysia|Kuala Lumpur|ringgit|Asia
Colombia|Bogota|peso|South America
Bangladesh|Dhaka|taka|Asia
Pakistan|Islamabad|rupee|Asia
Chile|Santiago|peso|South America
Finland|Helsinki|euro|Europe
Portugal|Lisbon|euro|Europe
Greece|Athens|euro|Europe
Czechia|Prague|koruna|Europe
Romania|Bucharest|leu|Europe
Peru|Lima|sol|South America
New Zealand|Wellington|dollar|Oceania
Iraq|Baghdad|dinar|Asia
Iran|Tehran|rial|Asia
Hungary|Budapest|forint|Europe
Ukraine|Kyiv|hryvnia|Europe
Morocco|Rabat|dirham|Africa
Kenya|Nairobi|shilling|Africa
Ethiopia|Addis Ababa|birr|Africa
Cuba|Havana|peso|North America
Ecuador|Quito|dollar|South America
Ghana|Accra|cedi|Africa
Algeria|Algiers|dinar|Africa
Tunisia|Tunis|dinar|Africa
Saudi Arabia|Riyadh|riyal|Asia
Jordan|Amman|dinar|Asia
Lebanon|Beirut|pound|Asia
Syria|Damascus|pound|Asia
Qatar|Doha|riyal|Asia
Kuwait|Kuwait City|dinar|Asia
Nepal|Kathmandu|rupee|Asia
Sri Lanka|Colombo|rupee|Asia
Cambodia|Phnom Penh|riel|Asia
Mongolia|Ulaanbaatar|tugrik|Asia
Kazakhstan|Astana|tenge|Asia
Uzbekistan|Tashkent|som|Asia
Azerbaijan|Baku|manat|Asia
Armenia|Yerevan|dram|Asia
Georgia|Tbilisi|lari|Asia
Afghanistan|Kabul|afghani|Asia
Bulgaria|Sofia|lev|Europe
Serbia|Belgrade|dinar|Europe
Croatia|Zagreb|euro|Europe
Slovenia|Ljubljana|euro|Europe
Slovakia|Bratislava|euro|Europe
Estonia|Tallinn|euro|Europe
Latvia|Riga|euro|Europe
Lithuania|Vilnius|euro|Europe
Belarus|Minsk|ruble|Europe
Albania|Tirana|lek|Europe
Iceland|Reykjavik|krona|Europe
Venezuela|Caracas|bolivar|South America
Bolivia|Sucre|boliviano|South America
Paraguay|Asuncion|guarani|South America
Uruguay|Montevideo|peso|South America
Guatemala|Guatemala City|quetzal|North America
Costa Rica|San Jose|colon|North America
Panama|Panama City|balboa|North America
Jamaica|Kingston|dollar|North America
Haiti|Port-au-Prince|gourde|North America
Dominican Republic|Santo Domingo|peso|North America
Dominica|Roseau|dollar|North America
Senegal|Dakar|franc|Africa
Niger|Niamey|franc|Africa
Sudan|Khartoum|pound|Africa
Uganda|Kampala|shilling|Africa
Tanzania|Dodoma|shilling|Africa
Rwanda|Kigali|franc|Africa
Somalia|Mogadishu|shilling|Africa
Zambia|Lusaka|kwacha|Africa
Angola|Luanda|kwanza|Africa
Guinea|Conakry|franc|Africa
Guinea-Bissau|Bissau|franc|Africa
Equatorial Guinea|Malabo|franc|Africa
Libya|Tripoli|dinar|Africa
Fiji|Suva|dollar|Oceania
""".strip().splitlines()
)


# Wordings by phrasing family. A question's family is drawn first, then one of its wordings, all with equal chance.
_CAPITAL = {
    "capital": ("What is the capital of {country}?", "Name the capital of {country}.",
                "Which city is the capital of {country}?"),
    "country": ("{city} is the capital of which country?", "Which country has the capital {city}?",
                "Of which country is {city} the capital?"),
    "continent": ("On which continent is {country}?", "On which continent does {country} lie?",
                  "Which continent is {country} part of?"),
    "money": ("Which currency is used in {country}?", "What is the currency of {country}?",
              "With what do people pay in {country}?"),
    "seat": ("Where does the government of {country} sit?", "From which city is {country} governed?"),
}  # fmt: skip
_TWO_HOP = {
    "money-of-capital": ("Which currency is used in the country whose capital is {city}?",
                         "What is the currency of the country with the capital {city}?",
                         "The capital is {city}. What is the currency of the country?",
                         "Name the currency of the country whose capital is {city}.",
                         "Which money is used where {city} is the capital?"),
    "continent-of-capital": ("On which continent is the country whose capital is {city}?",
                             "On which continent is the country with the capital {city}?",
                             "The capital is {city}. On which continent is the country?",
                             "Name the continent of the country whose capital is {city}.",
                             "Which continent holds the country with the capital {city}?"),
    "governed": ("What do people pay with in the land governed from {city}?",
                 "The government sits in {city}. Which money does its country use?"),
    "same-continent": ("Are {city} and {other} on the same continent?", "Do {city} and {other} share a continent?"),
}  # fmt: skip


def capital(rng: random.Random, phrasings: Phrasings) -> Draft:
    index = rng.randrange(len(ATLAS))
    country, city, currency, continent = ATLAS[index]
    difficulty = 1 + 3 * index // len(ATLAS)
    family = phrasings.pick(("capital", "country", "continent"), ("money", "seat"))
    prompt = rng.choice(_CAPITAL[family]).format(country=country, city=city)
    answer = {
        "capital": f"The capital of {country} is {city}.",
        "country": f"{city} is the capital of {country}.",
        "continent": f"{country} is in {continent}.",
        "money": f"The currency of {country} is the {currency}.",
        "seat": f"The capital of {country} is {city}.",
    }[family]
    return Draft(family, difficulty, prompt, answer, answer)


def two_hop(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Ask for a fact about the country of a capital. The question does not name the country."""
    index = rng.randrange(len(ATLAS))
    country, city, currency, continent = ATLAS[index]
    other = ATLAS[rng.randrange(len(ATLAS))]
    difficulty = 2 + 2 * index // len(ATLAS)
    family = phrasings.pick(("money-of-capital", "continent-of-capital"), ("governed", "same-continent"))
    prompt = rng.choice(_TWO_HOP[family]).format(city=city, other=other[1])
    match family:
        case "continent-of-capital":
            steps, target = f"{city} is the capital of {country}. {country} is in {continent}.", continent
        case "same-continent":
            target = "yes" if other[3] == continent else "no"
            steps = (
                f"{city} is the capital of {country}, in {continent}. "
                f"{other[1]} is the capital of {other[0]}, in {other[3]}."
            )
        case _:
            steps = f"{city} is the capital of {country}. The currency of {country} is the {currency}."
            target = currency
    return Draft(family, difficulty, prompt, worked(steps, target), target)


KINDS = (Kind("capital", capital, grade="exact", weight=2.0), Kind("two-hop", two_hop, weight=1.5))
