"""Word lists that the guards compare texts by: numbers in words, units, negations, opposites, ordinary words.

Each list is short on purpose. A word that is missing costs a guard its catch (the thresholds of the entries are left to
catch it), a word too many costs a hit.
"""

from __future__ import annotations


def _set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def _senses(text: str) -> dict[str, frozenset[str]]:
    """Lines "sense: word word" -> word -> the senses that it has; a sense may have several lines."""
    senses: dict[str, set[str]] = {}
    for line in text.strip().splitlines():
        sense, _, words = line.strip().partition(":")
        for word in words.split():
            senses.setdefault(word, set()).add(sense)
    return {word: frozenset(its) for word, its in senses.items()}


def _table(text: str) -> dict[str, str]:
    """Lines "name: form form form" -> form -> name; the name is a form too."""
    table: dict[str, str] = {}
    for line in text.strip().splitlines():
        name, _, forms = line.strip().partition(":")
        table.update(dict.fromkeys([name, *forms.split()], name))
    return table


SMALL_NUMBERS = {
    "zero": 0, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17,
    "eighteen": 18, "nineteen": 19, "twenty": 20,
    "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
    "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10,
    "twice": 2, "double": 2, "triple": 3, "dozen": 12, "half": 0.5, "quarter": 0.25,
}  # fmt: skip
# "one" is in no list: it is a pronoun more often than a number.
MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}

UNITS = _table(
    """
    kilometre: km kms kilometer kilometers kilometres
    metre: meter meters metres
    centimetre: cm centimeter centimeters centimetres
    millimetre: mm millimeter millimeters millimetres
    mile: miles mi
    yard: yards yd
    foot: feet ft
    inch: inches
    kilogram: kg kgs kilo kilos kilograms
    gram: grams g
    milligram: mg milligrams
    pound: pounds lb lbs gbp sterling £
    ounce: ounces oz
    stone: stones
    tonne: tonnes ton tons
    litre: liter liters litres l
    millilitre: ml milliliter milliliters millilitres
    gallon: gallons gal
    pint: pints
    cup: cups
    teaspoon: teaspoons tsp
    tablespoon: tablespoons tbsp
    celsius: centigrade °c
    fahrenheit: °f
    kelvin: kelvins
    millisecond: ms milliseconds
    second: seconds sec secs
    minute: minutes min mins
    hour: hours hr hrs
    day: days
    week: weeks
    month: months
    year: years yr yrs
    euro: euros eur €
    dollar: dollars usd $
    yen: jpy ¥
    rupee: rupees inr
    franc: francs chf
    byte: bytes
    kilobyte: kb kilobytes
    megabyte: mb megabytes
    gigabyte: gb gigabytes
    terabyte: tb terabytes
    bit: bits
    watt: watts w
    kilowatt: kw kilowatts
    joule: joules
    calorie: calories kcal
    volt: volts
    percent: % percentage
    hectare: hectares
    acre: acres
    bar: bars
    psi:
    knot: knots
    mph:
    """
)
ONLY_AFTER_A_NUMBER = {"g", "l", "w", "mi", "min", "ms", "mb", "gb", "tb", "kb", "bar", "bars", "stone", "second"}

NEGATIONS = _set(
    """
    not no never none neither nor nobody nothing nowhere without cannot except excluding exclude excludes avoid
    avoids avoiding prevent prevents preventing unless rarely hardly
    """
)
# Said of the one who asks, not of what is asked.
SAID_OF_ONESELF = (
    r"\b(?:do not|can not|not) (?:quite |really )?(?:understand|know|get|find out|figure|see|remember|sure)\b"
)
ASKS = _table(
    """
    who: whom whose
    when:
    where:
    why:
    """
)
PHRASES = {
    "smallest to largest": "ascending", "lowest to highest": "ascending", "low to high": "ascending",
    "largest to smallest": "descending", "highest to lowest": "descending", "high to low": "descending",
    "oldest to newest": "ascending", "newest to oldest": "descending", "all right": "okay", "at most": "under",
    "no more than": "under", "up to": "under", "at least": "over", "no less than": "over",
}  # fmt: skip
"""Phrases that a guard would misread word by word -> the word that says it."""

OPPOSITES = _senses(
    """
    up: up upward upwards increase increases increased increasing raise raises raising rise rises rising grow grows
    up: growing gain gains higher
    open: open opens opening opened
    start: start starts starting started begin begins beginning launch enable enables enabling activate
    before: before earlier prior
    first: first earliest
    max: max maximum maximise maximize largest biggest greatest highest most longest tallest larger bigger greater more
    max: longer taller over above exceeding
    best: best better pros advantages advantage benefits benefit upsides strengths good
    boil: boil boils boiling melt melts melting
    hard: hard harder hardest
    adult: adult adults grown grownup grownups
    hot: hot hottest hotter warm warmest warmer heat heating
    fast: fast fastest faster fastest quick quicker quickest speed
    cheap: cheap cheapest cheaper inexpensive
    heavy: heavy heaviest heavier
    old: old oldest older
    buy: buy buying purchase purchasing bought
    ascending: ascending smallest-first
    import: import imports importing
    add: add adds adding install installs installing insert
    encode: encode encoding encrypt encrypting encryption compress compressing
    push: push pushing upload uploading send sending
    left: left leftmost
    north: north northern northernmost
    east: east eastern easternmost
    inside: inside indoors indoor internal
    safe: safe safely safer healthy
    allow: allow allows allowed permitted legal allowing
    accept: accept accepting accepts agree
    love: love loves loved
    win: win wins winning won winner winners beat beats beating defeat defeats victory victories victorious victor
        victors prevail prevailed
    borrow: borrow borrowing
    remember: remember remembering
    same: same identical similar
    always: always
    all: all every each
    wet: wet wetter
    bright: bright brighter brightest
    strong: strong stronger strongest
    deep: deep deeper deepest
    male: male man men boy father husband king
    sync: sync synchronous
    serialise: serialise serialize
    lock: lock locking
    show: show shows showing reveal display
    arrive: arrive arrival arrivals arrives
    """
)
REVERSED = _senses(
    """
    up: down downward downwards decrease decreases decreased decreasing lower lowers lowering reduce reduces reducing
    up: fall falls falling drop drops shrink lose loses losing cut
    open: close closes closing closed shut
    start: stop stops stopping stopped end ends ending ended finish disable disables disabling deactivate quit
    before: after later since past
    first: last latest final
    max: minimum minimise minimize smallest least lowest fewest shortest smaller less fewer shorter min under below
    best: worst worse cons disadvantages disadvantage drawbacks drawback downsides weaknesses bad harms
    boil: freeze freezes freezing
    hard: soft softer softest
    adult: baby babies infant infants toddler child children kid kids
    hot: cold coldest colder cool coolest cooler cooling
    fast: slow slowest slower
    cheap: expensive priciest dearest costly
    heavy: lightest lighter
    old: new newest newer young youngest younger
    buy: sell selling sold
    ascending: descending
    import: export exports exporting
    add: remove removes removing delete deletes deleting uninstall subtract
    encode: decode decoding decrypt decrypting decryption decompress extract
    push: pull pulling download downloading receive receiving
    left: right rightmost
    north: south southern southernmost
    east: west western westernmost
    inside: outside outdoors outdoor external
    win: lose lost losing loses loser losers defeated loss losses
    safe: dangerous unsafe unhealthy risky
    allow: forbid forbidden banned illegal prohibited deny
    accept: reject decline rejecting declining refuse
    love: hate dislike dislikes
    borrow: lend lending
    remember: forget forgetting
    same: different opposite
    always: sometimes
    all: some
    wet: dry
    bright: dark darker dim
    strong: weak weaker weakest
    deep: shallow shallower
    male: woman women girl mother wife queen female
    sync: asynchronous async
    serialise: deserialise deserialize
    lock: unlock
    show: hide hides hiding
    arrive: depart departure departures leave leaves
    """
)

MONTHS = _table(
    """
    january: jan
    february: feb
    march:
    april: apr
    may:
    june: jun
    july: jul
    august: aug
    september: sep sept
    october: oct
    november: nov
    december: dec
    """
)
TIME_UNITS = _set(
    """
    millisecond second minute hour day week month year
    """
)

DAY_WORDS = _table(
    """
    monday: mondays mon
    tuesday: tuesdays tue
    wednesday: wednesdays wed
    thursday: thursdays thu
    friday: fridays fri
    saturday: saturdays
    sunday: sundays
    today: tonight
    tomorrow:
    yesterday:
    spring: springtime
    summer: summertime
    autumn:
    winter: wintertime
    christmas: xmas
    easter:
    morning: mornings
    afternoon:
    evening: evenings
    midnight:
    noon: midday
    weekend: weekends
    """
)

FUNCTION_WORDS = _set(
    """
    one ones a an the this that these those of in on at by for with to from into onto as is are was were be been
    being am do does did done can could should would will shall may might must have has had i you he she it we
    they me my your his her its our their us them what which who whom whose how when where why and or but if so
    than then there here please s t m re ve ll d about just also very really some any
    """
)
# What people wrap a question in: a word that only one of two texts has seldom makes them mean different things.
REQUEST_WORDS = _set(
    """
    tell show give explain describe name list say state provide write draft compose put phrase help assist need
    needs want wants wish like love look looking find found search know understand wonder wondering curious
    interested question ask asking answer reply suggest suggestion recommend recommendation advise advice idea
    ideas tip tips option choose pick choice way ways method approach process procedure step steps manner means
    possible possibly able ability allow good fine okay ok right correct proper properly great nice best better
    ideal suitable appropriate using use used uses usage make makes making made create creating build prepare
    produce get gets getting got obtain come comes go goes going take takes taking happen happens work works
    working function functions act serve serves count total amount number quantity figure value sum many much
    long often frequently usually normally typically generally quick quickly brief briefly short shortly simple
    simply easy easily little bit small kind sort type types thing things stuff something anything someone
    anyone people person case situation example instance reason reasons cause causes purpose meaning mean meant
    refer refers definition define concept exactly actually currently nowadays today back still even ever yet
    already again now once else other another own various certain given particular particularly specific
    specifically main let lets lead leads result results end try trying tried plan planning consider considering
    think believe guess suppose assume worry worried concerned concern hear heard told true false fact whether
    turn turns turned out up off down over around through during within along per each every any some between
    among against regarding concerning involved involving related included including contains contain containing
    thanks thank hello hi hey info information details detail summary overview guide instructions tutorial code
    command snippet sentence text place position time times hour day moment period duration cost costs price
    start begin begins beginning call called calls set sets run runs running keep keeps
    """
)
# Capitalised because a sentence begins with them, so no names.
OPENERS = FUNCTION_WORDS | _set(
    """
    explain give tell show write list name describe convert calculate compute find translate summarise summarize
    compare suggest recommend make create need want help is are turn express change get let say work figure
    between state provide define outline briefly quick hi hello hey thanks using use given say suppose assuming
    rewrite draft compose pick choose rank sort not never no without after before while during until since
    because every all most many much more less few each both either neither one two three four five
    """
)
