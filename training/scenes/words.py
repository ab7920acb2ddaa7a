"""Words, names, codes and numbers that images show. Train and eval never share one: a checksum decides
the split."""

from __future__ import annotations

from random import Random
from zlib import crc32

TRAIN, EVAL = "train", "eval"


def listed(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


THINGS = listed("""
acorn almond anchor apron badge bagel bakery balcony bamboo banana banjo barley basil basket battery
beacon bean beetle berry bicycle biscuit blanket blender bobbin bonnet bottle bowl bracket bread brick
bridge broom brush bucket butter button cabbage cabin cable cactus camera candle canvas carrot castle
celery cello cement cereal chalk cheese cherry chisel clamp clay cloak clock clover cobalt coconut coffee
compass copper coral cotton cradle crayon cricket cushion dagger dahlia daisy denim desk dolphin donkey
dough dragon drill drum eagle easel elbow ember engine fabric falcon feather fence fern fiddle flannel
flask flour flute forest fossil fountain galaxy garden garlic ginger glacier glove goblet granite grape
gravel guitar hammer harbor harness hazel helmet hinge honey hornet icicle indigo island ivory jacket
jasmine jelly jigsaw juniper kayak kettle kitten ladder lagoon lamp lantern laptop laurel leather lemon
lentil lettuce lever lilac linen lizard lobster locket lumber magnet mango maple marble market meadow
melon mirror mitten mortar muffin mustard napkin needle nickel noodle nutmeg oatmeal olive onion orchid
otter oyster paddle panel papaya parcel parsley pasta peach peanut pebble pencil pepper piano pickle
pigeon pillow pliers plum pocket pollen poppy potato pretzel puzzle quartz quilt rabbit radish raisin
ribbon rice river rocket rope rubber rudder saddle saffron salad salmon sandal satin saucer scarf seed
sesame shovel silk silver skillet socket soup spade spinach sponge spoon squash stapler statue string
sugar syrup tablet tailor teapot temple thimble thistle thread ticket timber toast tomato towel tractor
tripod trumpet tulip tunnel turnip turtle umbrella valley vanilla velvet violin walnut walrus washer
willow window wrench yarn yogurt zipper
""")

NAMES = listed("""
Abel Ada Alma Amir Anna Arlo Asha Bela Bruno Carla Cleo Dara Diego Dora Edith Elias Emil Esme Farid Felix
Freya Gita Greta Hana Hugo Ida Ines Ivan Jonas Juno Kaito Kira Lars Leila Lena Luca Mabel Marco Maya Milo
Nadia Nils Noor Olga Omar Oscar Petra Priya Quinn Rafael Rosa Ruben Sana Selma Silas Tara Theo Uma Vera
Viktor Wanda Yara Yusuf Zara Zeno
""")

PLACES = listed("""
Aspen Bergen Bilbao Bristol Cairo Calgary Cork Delft Dresden Durban Exeter Faro Geneva Ghent Hanoi Havana
Izmir Jaipur Kazan Kyoto Lagos Leeds Lima Lyon Madrid Malmo Munich Nantes Naples Osaka Oslo Perth Porto
Prague Quito Riga Rome Seoul Sofia Sydney Tallinn Tampa Tokyo Turin Utrecht Vienna Warsaw York Zagreb
Zurich
""")

KEYS = listed("""
Name City Phone Date Room Order Invoice Account Amount Weight Height Price Model Serial Owner Street Gate
Seat Flight Batch Grade Status Color Size Shelf Origin Driver Doctor Manager Supplier Quantity Balance
Discount Deposit Ticket Track Unit Zone Floor Level Branch Client Rate Fee Code Number Email Country Age
Score
""")

_ONSET = listed("b c d f g h j k l m n p r s t v w z br cl dr fl gr pl sk sp st tr")
_NUCLEUS = listed("a e i o u a e i o ai ea oo")
_CODA = ["", "", "", "n", "r", "l", "s", "t", "m", "k", "nd", "st"]
# What real words have and syllables do not: every letter beside many others, twice, and in groups.
_PIECES = listed("""
a b c d e f g h i j k l m n o p q r s t u v w x y z a e i o u l n r s t
bb cc dd ee ff gg ll mm nn oo pp rr ss tt zz
ch ck ct ft gh gn gu kn lb ld lm lt mb mp nch nd ng nk nt ph pt qu rch rd rk rn rt sch sh sp squ ss st tch th
ble dle gle kle ple tle ight ion ious our tion ure wh wr xt ya ye ze
""")
_CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # no I, O, 0, 1: some fonts draw them alike


def in_split(word: str, split: str) -> bool:
    """One word in five belongs to the evaluation set alone."""
    return (crc32(word.lower().encode()) % 5 == 0) == (split == EVAL)


_SPLIT = {
    (kind, split): tuple(w for w in words if in_split(w, split))
    for kind, words in (("thing", THINGS), ("name", NAMES), ("place", PLACES))
    for split in (TRAIN, EVAL)
}


def invented(rng: Random, split: str) -> str:
    """A word nobody knows: of syllables, in training mostly of any letters whatever."""
    while True:
        if split == TRAIN and rng.random() < 0.65:  # evaluation draws nothing here: its set stays as it is
            word = "".join(rng.choice(_PIECES) for _ in range(rng.randint(2, 7)))
        else:
            word = "".join(
                rng.choice(_ONSET) + rng.choice(_NUCLEUS) + rng.choice(_CODA)
                for _ in range(rng.randint(1, 3))
            )
        if 3 <= len(word) <= 10 and in_split(word, split):
            return word


def thing(rng: Random, split: str) -> str:
    """A noun, real or (mostly, in training) invented, in lower case."""
    if rng.random() < (0.75 if split == TRAIN else 0.3):
        return invented(rng, split)
    return rng.choice(_SPLIT["thing", split])


def styled(rng: Random, word: str) -> str:
    draw = rng.random()
    return word if draw < 0.4 else word.capitalize() if draw < 0.75 else word.upper()


def word(rng: Random, split: str) -> str:
    return styled(rng, thing(rng, split))


def name(rng: Random, split: str) -> str:
    return rng.choice(_SPLIT["name", split]) if rng.random() < 0.6 else invented(rng, split).capitalize()


def place(rng: Random, split: str) -> str:
    return rng.choice(_SPLIT["place", split]) if rng.random() < 0.6 else invented(rng, split).capitalize()


def distinct(rng: Random, split: str, count: int, style: str = "capital") -> list[str]:
    """Different nouns in one style: "capital", "lower" or "upper"."""
    found: list[str] = []
    while len(found) < count:
        candidate = thing(rng, split)
        if candidate not in found and len(candidate) <= 9:
            found.append(candidate)
    return [w.capitalize() if style == "capital" else w.upper() if style == "upper" else w for w in found]


def code(rng: Random, split: str) -> str:
    """An upper-case code such as K7Q2 or RT-4821."""
    while True:
        text = "".join(rng.choice(_CODE) for _ in range(rng.randint(4, 6)))
        if rng.random() < 0.25:
            text = text[:2] + "-" + text[2:]
        if in_split(text, split):
            return text


def number(rng: Random, split: str) -> str:
    while True:
        draw = rng.random()
        if draw < 0.4:
            text = str(rng.randint(10, 99999))
        elif draw < 0.7:
            text = f"{rng.randint(1, 999)}.{rng.randint(0, 99):02d}"
        elif draw < 0.85:
            text = f"{rng.randint(1, 99)},{rng.randint(0, 999):03d}"
        else:
            text = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        if in_split(text, split):
            return text


def price(rng: Random, top: int = 99) -> str:
    return f"{rng.randint(1, top)}.{rng.randint(0, 99):02d}"


def date(rng: Random) -> str:
    year, month, day = rng.randint(2015, 2029), rng.randint(1, 12), rng.randint(1, 28)
    return f"{year}-{month:02d}-{day:02d}" if rng.random() < 0.5 else f"{day:02d}/{month:02d}/{year}"
