"""Questions asked in several ways, to see whether a router decides by what is asked or by how it is put.

Every intent has a few forms and a few things to fill in. A pair is the same thing in two of the forms.
"""

from __future__ import annotations

import random

__all__ = ["paraphrases"]


def paraphrases(per_intent: int = 10, seed: int = 0) -> list[tuple[str, str]]:
    """Some hundred pairs: up to `per_intent` of each intent, no question twice. The same seed gives the same pairs."""
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    for forms, things in _INTENTS:
        for thing in rng.sample(things, min(per_intent, len(things))):
            one, other = rng.sample(forms, 2)
            found.append((one.replace("@", thing), other.replace("@", thing)))
    return found


def _intent(forms: str, things: str) -> tuple[list[str], list[str]]:
    """Forms a line each, with @ for the thing; things between semicolons."""
    return [form.strip() for form in forms.strip().splitlines()], [thing.strip() for thing in things.split(";")]


_INTENTS = (
    _intent(
        """What is the capital of @?
        Which city is the capital of @?
        Name the capital city of @.
        Can you tell me what the capital of @ is?""",
        "Portugal; Kenya; Vietnam; Chile; Norway; Jordan; Ghana; Austria; Peru; Iceland",
    ),
    _intent(
        """Who wrote @?
        Which author wrote @?
        Tell me the name of the writer of @.
        By whom was @ written?""",
        "Middlemarch; The Trial; Don Quixote; Things Fall Apart; Emma; Dracula; Faust; Walden; The Odyssey; Persuasion",
    ),
    _intent(
        """Explain how @ works.
        How does @ work?
        I would like to understand the way @ works. Please explain it.
        Could you give me an explanation of the workings of @?""",
        "a refrigerator; photosynthesis; a jet engine; public-key encryption; a vaccine; a battery; the stock market; "
        "radar; a transistor; compound interest",
    ),
    _intent(
        """Why is @?
        What is the reason that @?
        Tell me the cause: why is @?
        For what reason is @?""",
        "the sky blue; sea water salty; ice lighter than water; Venus hotter than Mercury; gold so expensive; "
        "blood red; bread dough elastic; the Moon cratered; glass transparent; leap year needed",
    ),
    _intent(
        """A shop sells @ apples a day for 4 dollars each. How much does it earn in a week?
        Each day a shop sells @ apples at a price of 4 dollars. What are its earnings over seven days?
        If @ apples are sold by a shop every day, and each costs 4 dollars, how much money does it make per week?""",
        "12; 17; 23; 38; 45; 52; 64; 71; 86; 93",
    ),
    _intent(
        """Tom has @ marbles and gives a third of them to Ann. How many does he keep?
        Of his @ marbles, Tom gives one third to Ann. How many marbles are left for him?
        After giving Ann a third of his @ marbles, how many marbles does Tom still have?""",
        "12; 21; 33; 48; 57; 66; 75; 84; 93; 99",
    ),
    _intent(
        """Solve for x: @.
        What value of x satisfies @?
        Find x such that @.
        Determine the solution x of the equation @.""",
        "3x + 5 = 20; 2x - 7 = 9; 5(x - 1) = 35; x/4 + 3 = 8; 7x = 2x + 45; 9 - x = 4x - 6; x^2 = 49; 2^x = 64; "
        "log10(x) = 3; 6x + 1 = 4x + 11",
    ),
    _intent(
        """What is the derivative of @?
        Differentiate @ with respect to x.
        Compute d/dx of @.
        Find the derivative of the function f(x) = @.""",
        "x^3 sin(x); e^(2x); ln(x)/x; cos(x^2); x^5 - 4x; sqrt(x + 1); tan(x); x e^x; 1/(1 + x^2); arctan(x)",
    ),
    _intent(
        """Write a Python function that @.
        I need a function in Python which @.
        Implement in Python: a function that @.
        Please code a Python function. It @.""",
        "reverses a list; checks whether a string is a palindrome; merges two sorted lists; "
        "counts the words in a file; removes duplicates from a list; "
        "computes the n-th Fibonacci number; flattens a nested list; "
        "validates an email address; finds the longest common prefix; rotates a matrix by 90 degrees",
    ),
    _intent(
        """What does the @ command do in Linux?
        Explain the Linux command @.
        In Linux, what is @ used for?
        Tell me about the purpose of the command @ on Linux.""",
        "grep; chmod; tar; awk; sed; ps; curl; find; mount; rsync",
    ),
    _intent(
        """What are the symptoms of @?
        Which symptoms does @ have?
        How can I recognise @ by its symptoms?
        List the signs that someone has @.""",
        "anaemia; measles; appendicitis; diabetes; pneumonia; migraine; malaria; gout; asthma; hypothyroidism",
    ),
    _intent(
        """Translate "@" into French.
        How do you say "@" in French?
        What is the French translation of "@"?
        Give me "@" in French.""",
        "good morning; I am hungry; where is the station; thank you very much; see you tomorrow; the book is red; "
        "how much is it; I lost my key; we are late; it is raining",
    ),
    _intent(
        """When did @ happen?
        In which year did @ take place?
        What was the year of @?
        Tell me the date of @.""",
        "the French Revolution; the fall of the Berlin Wall; the Battle of Hastings; the first Moon landing; "
        "the Great Fire of London; the Russian Revolution; the sinking of the Titanic; the Boston Tea Party; "
        "the eruption of Vesuvius; the signing of Magna Carta",
    ),
    _intent(
        """Which law of physics describes @?
        What physical law governs @?
        @ is described by which law of physics?
        Name the law in physics that explains @.""",
        "the force between two charges; the voltage across a resistor; the pressure of an ideal gas; "
        "the refraction of light; the induction of a current; the motion of planets; the force of a spring; "
        "the radiation of a black body; buoyancy in water; the flow of heat",
    ),
    _intent(
        """What is the chemical formula of @?
        Give the chemical formula for @.
        How is @ written as a chemical formula?
        Which formula does @ have in chemistry?""",
        "table salt; ammonia; sulfuric acid; methane; baking soda; ethanol; rust; glucose; ozone; limestone",
    ),
    _intent(
        """Summarise the plot of @ in two sentences.
        In two sentences, what happens in @?
        Give me a summary of the story of @, two sentences long.
        Tell the plot of @ briefly: two sentences.""",
        "Hamlet; Macbeth; Moby Dick; Frankenstein; The Iliad; Oliver Twist; Jane Eyre; Robinson Crusoe; "
        "Crime and Punishment; The Tempest",
    ),
    _intent(
        """Is @ a prime number?
        Tell me whether @ is prime.
        Would you call @ a prime?
        Check if the number @ is a prime.""",
        "91; 97; 119; 127; 143; 151; 169; 181; 221; 233",
    ),
    _intent(
        """What is the difference between @?
        How do @ differ?
        Explain the distinction between @.
        In what way are @ different from each other?""",
        "a virus and a bacterium; weather and climate; speed and velocity; a list and a tuple in Python; "
        "TCP and UDP; mitosis and meiosis; debt and equity; a comet and an asteroid; a lake and a pond; "
        "affect and effect",
    ),
    _intent(
        """Write a short poem about @.
        Compose a brief poem on the subject of @.
        I want a little poem about @.
        Could you make up a short poem on @?""",
        "autumn; the sea; an old clock; friendship; a rainy street; the first snow; a lighthouse; hope; bees; my cat",
    ),
    _intent(
        """How do I cook @?
        What is the way to cook @?
        Give me a recipe for @.
        Tell me how @ should be prepared.""",
        "risotto; a soft-boiled egg; lentil soup; pancakes; roast chicken; rice; mushrooms; goulash; tofu; asparagus",
    ),
    _intent(
        """Which of these is a mammal: @, a trout, a gecko or a sparrow?
        Choose the mammal among @, a trout, a gecko and a sparrow.
        A trout, a gecko, a sparrow, @: one of these animals is a mammal. Which one is it?""",
        "a whale; a bat; a seal; a hedgehog; a camel; a dolphin; a mole; a platypus; an otter; a moose",
    ),
    _intent(
        """A train travels @ km in 3 hours. What is its average speed?
        What average speed does a train have that covers @ km in 3 hours?
        In three hours a train goes @ km. Compute its mean speed.""",
        "180; 210; 240; 270; 300; 330; 360; 390; 420; 450",
    ),
    _intent(
        """What is @ percent of 250?
        How much is @ percent of 250?
        Calculate @ % of 250.
        Take 250 and find @ percent of it.""",
        "4; 8; 12; 16; 20; 24; 30; 36; 44; 60",
    ),
    _intent(
        """Under which circumstances is @ legal?
        When does the law allow @?
        In what cases is @ permitted by law?
        Tell me when @ is lawful.""",
        "self-defence; breaking a contract; a search without a warrant; recording a phone call; "
        "dismissing an employee; "
        "flying a drone; copying a book; a citizen's arrest; withholding rent; insider information",
    ),
    _intent(
        """What did @ contribute to science?
        Which scientific contributions did @ make?
        Name what science owes to @.
        For what achievements in science is @ known?""",
        "Marie Curie; Isaac Newton; Ada Lovelace; Charles Darwin; Emmy Noether; Niels Bohr; Rosalind Franklin; "
        "Galileo Galilei; Alan Turing; Gregor Mendel",
    ),
    _intent(
        """Why does @ matter in economics?
        What makes @ important in economics?
        In economics, what is the significance of @?
        Explain the importance of @ for the economy.""",
        "inflation; unemployment; the interest rate; productivity; trade; scarcity; competition; taxation; "
        "consumer confidence; the exchange rate",
    ),
    _intent(
        """Fix the error in this line of Python: @
        This Python line has a bug. Correct it: @
        What is wrong with the following Python code, and how should it be? @""",
        "pritn('hello'); for i in range(10) print(i); x = [1, 2, 3; if x = 3: pass; def f(x) return x; "
        "print('a' + 1); while True print(1); import maths; d = {1: 2, 3}; s = 'it's'",
    ),
    _intent(
        """Give me a synonym for @.
        What is another word for @?
        Which word means the same as @?
        Name a word with the meaning of @.""",
        "happy; rapid; brave; ancient; huge; silent; clever; honest; fragile; wealthy",
    ),
    _intent(
        """What is the largest @?
        Which is the biggest @ there is?
        Name the largest @.
        Tell me which @ is the greatest in size.""",
        "ocean; planet of the solar system; desert on Earth; organ of the human body; land animal; island; "
        "lake in Africa; country by area; bone in the body; moon of Saturn",
    ),
    _intent(
        """Prove that @.
        Show a proof of the statement that @.
        Give a rigorous argument for why @.
        Demonstrate mathematically that @.""",
        "the square root of 2 is irrational; there are infinitely many primes; the sum of two even numbers is even; "
        "a continuous function on a closed interval is bounded; every tree has a leaf; "
        "the angles of a triangle add up to 180 degrees; n^3 - n is divisible by 6; "
        "the harmonic series diverges; every finite field has prime power order; the empty set is unique",
    ),
    _intent(
        """How far is @?
        What is the distance of @?
        Tell me how many kilometres away @ is.
        Which distance has to be covered: @?""",
        "the Moon from the Earth; Paris from Madrid; the Sun from Mars; Tokyo from Seoul; Rome from Naples; "
        "Cairo from Nairobi; Boston from Chicago; Oslo from Bergen; Lima from Quito; Sydney from Perth",
    ),
    _intent(
        """Draft an email to my boss: @.
        Help me write an e-mail to my manager. Content: @.
        Please compose a mail for my boss saying this: @.""",
        "I am ill today; I need a day off on Friday; the report will be late; I would like a raise; "
        "the meeting should move to Monday; I have finished the project; the printer is broken; "
        "I want to work from home; a customer has complained; I found a mistake in the budget",
    ),
    _intent(
        """What is the moral view of @ on lying?
        How would @ judge lying?
        Is lying acceptable according to @?
        State the position of @ about telling lies.""",
        "Kant; a utilitarian; Aristotle; Augustine; a contractualist; a Stoic; Confucius; Nietzsche; Hume; Aquinas",
    ),
    _intent(
        """Convert @ to kilograms.
        How many kilograms are @?
        What do @ come to in kg?
        Express @ in kilograms.""",
        "5 pounds; 12 ounces; 3 tons; 150 pounds; 9 stone; 40 ounces; 2500 grams; 7 pounds; 18 stone; 1000 ounces",
    ),
    _intent(
        """Which data structure is best for @?
        What data structure should I use for @?
        For @, which data structure do you recommend?
        Recommend a data structure suited to @.""",
        "a queue of jobs by priority; fast look-up by key; undoing edits; autocompletion of words; a social network; "
        "range queries over sorted keys; detecting duplicates; a sliding window of values; parsing brackets; "
        "a file system",
    ),
    _intent(
        """Describe the culture of @.
        What is the culture of @ like?
        Tell me something about the culture of @.
        How would you characterise @ culturally?""",
        "ancient Egypt; the Aztecs; modern Japan; the Vikings; the Ottoman Empire; Renaissance Florence; the Inuit; "
        "colonial India; medieval Mali; the Phoenicians",
    ),
    _intent(
        """A rectangle is @ cm long and 6 cm wide. What is its area?
        What area does a rectangle have whose sides are @ cm and 6 cm?
        Compute the area of a rectangle with length @ cm and width 6 cm.""",
        "8; 9; 11; 13; 15; 17; 19; 22; 25; 30",
    ),
    _intent(
        """What is the role of @ in the cell?
        Which function does @ have within a cell?
        Explain what @ does in a cell.
        In cell biology, what is @ responsible for?""",
        "the mitochondrion; the ribosome; the nucleus; the Golgi apparatus; the lysosome; the cell membrane; "
        "the endoplasmic reticulum; the chloroplast; the cytoskeleton; the vacuole",
    ),
    _intent(
        """Suggest three names for @.
        Think of three possible names for @.
        I am looking for a name for @. Give me three ideas.
        What could @ be called? Offer three names.""",
        "a bakery; a puppy; a sailing boat; a podcast about history; a yoga studio; a chess club; a spaceship; "
        "a coffee brand; a robot; a band",
    ),
    _intent(
        """If all @ are blue and Max is one of the @, what colour is Max?
        Every one of the @ is blue, and Max belongs to the @. Which colour does Max have?
        Max is among the @, which are all blue. So what is the colour of Max?""",
        "wugs; blickets; dragons; robots; tigers; wizards; snails; giants; parrots; aliens",
    ),
)
