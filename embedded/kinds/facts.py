"""Facts to remember: a small world atlas, questions that chain two of its facts, and an invented staff directory.

The atlas is common knowledge. The directory is made up (see `_person`): names share their first and last parts, so that
half a memory confidently gives a colleague's answer. Well-known entries are asked about more often while training,
evaluation asks about all alike.
"""

from __future__ import annotations

import random

from .kind import Draft, Kind, Phrasings, worked

# Country, capital, currency, continent.
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


def _skewed(rng: random.Random, size: int, phrasings: Phrasings) -> int:
    """An index below `size`: training prefers low ones (the well-known), evaluation takes all alike."""
    if phrasings.rare_weight >= 0.2:
        return rng.randrange(size)
    return int(size * rng.random() ** 1.5)


def capital(rng: random.Random, phrasings: Phrasings) -> Draft:
    index = _skewed(rng, len(ATLAS), phrasings)
    country, city, currency, continent = ATLAS[index]
    difficulty = 1 + 3 * index // len(ATLAS)
    family = phrasings.pick(("capital", "country", "continent"), ("money", "seat"))
    prompt, answer = {
        "capital": (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
        "country": (f"{city} is the capital of which country?", f"{city} is the capital of {country}."),
        "continent": (f"On which continent is {country}?", f"{country} is in {continent}."),
        "money": (f"Which currency is used in {country}?", f"The currency of {country} is the {currency}."),
        "seat": (f"Where does the government of {country} sit?", f"The capital of {country} is {city}."),
    }[family]
    return Draft(family, difficulty, prompt, answer, answer)


def two_hop(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Two facts in a row: the first hop is not asked for, and nothing in the question contains it."""
    index = _skewed(rng, len(ATLAS), phrasings)
    country, city, currency, continent = ATLAS[index]
    difficulty = 2 + 2 * index // len(ATLAS)
    family = phrasings.pick(("money-of-capital", "continent-of-capital"), ("letters", "same-continent"))
    match family:
        case "money-of-capital":
            prompt = f"Which currency is used in the country whose capital is {city}?"
            steps, target = (
                f"{city} is the capital of {country}. The currency of {country} is the {currency}.",
                currency,
            )
        case "continent-of-capital":
            prompt = f"On which continent is the country whose capital is {city}?"
            steps, target = f"{city} is the capital of {country}. {country} is in {continent}.", continent
        case "letters":
            letters = [letter for letter in city if letter.isalpha()]
            prompt = f"With which letter does the name of the capital of {country} end?"
            steps, target = f"The capital of {country} is {city}. {' '.join(letters)}.", letters[-1].lower()
        case _:
            other = ATLAS[_skewed(rng, len(ATLAS), phrasings)]
            prompt = f"Are {city} and {other[1]} on the same continent?"
            target = "yes" if other[3] == continent else "no"
            steps = (
                f"{city} is the capital of {country}, in {continent}. "
                f"{other[1]} is the capital of {other[0]}, in {other[3]}."
            )
    return Draft(family, difficulty, prompt, worked(steps, target), target)


_FIRST = ("Alma", "Bruno", "Carla", "Diego", "Elsa", "Felix", "Greta", "Hugo", "Irma", "Jonas", "Mara", "Olga")
_LAST = ("Arndt", "Bauer", "Costa", "Duran", "Ferro", "Holm", "Ibsen", "Lund", "Novak", "Rossi", "Silva", "Weber")
_TEAMS = ("sales", "design", "legal", "support", "research", "finance", "security", "training")


def _person(number: int) -> tuple[str, str, int, int]:
    """Name, team, room and extension of invented person `number` in [0, 144): fixed for ever by arithmetic alone."""
    mixed = (number * 2654435761 + 40503) % 2**32
    name = f"{_FIRST[number % len(_FIRST)]} {_LAST[number // len(_FIRST)]}"
    return name, _TEAMS[(mixed >> 8) % len(_TEAMS)], 10 + (mixed >> 13) % 80, 10 + (mixed >> 21) % 80


def directory(rng: random.Random, phrasings: Phrasings) -> Draft:
    size = len(_FIRST) * len(_LAST)
    # The order of fame is scattered over the names, so that frequent and rare people share first and last names.
    index = _skewed(rng, size, phrasings)
    name, team, room, phone = _person(index * 77 % size)
    difficulty = 1 + 3 * index // size
    family = phrasings.pick(("team", "room", "phone"), ("works-with", "visit"))
    prompt, answer = {
        "team": (f"Which team is {name} in?", f"{name} is in the {team} team."),
        "room": (f"In which room is {name}?", f"{name} is in room {room}."),
        "phone": (f"What is the extension of {name}?", f"{name} has extension {phone}."),
        "works-with": (f"Whom does {name} work for: which team?", f"{name} is in the {team} team."),
        "visit": (f"I want to visit {name}. Which room do I go to?", f"{name} is in room {room}."),
    }[family]
    return Draft(family, difficulty, prompt, answer, answer)


KINDS = (
    Kind("capital", capital, grade="exact", weight=0.7),
    Kind("two-hop", two_hop, weight=1.0),
    Kind("directory", directory, grade="exact", weight=1.2),
)
