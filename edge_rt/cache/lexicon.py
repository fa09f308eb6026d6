"""Word lists of the lexical guard, in English. Each is a plain string: a line is a group, words are blank-separated."""

from __future__ import annotations

# Opposites on one scale: with a negation, or with a second such pair, the meaning is the same again.
SCALES = """
more less|fewer
most|mostly least
good|best|better|great bad|worst|worse|awful
big|large|bigger|larger|biggest|largest|huge small|little|smaller|smallest|tiny
high|higher|highest low|lower|lowest
long|longer|longest short|shorter|shortest
tall|taller|tallest short|shorter|shortest
fast|faster|fastest|quick|quickly slow|slower|slowest|slowly
hot|hotter|hottest|warm cold|colder|coldest|cool
hard|harder|hardest|difficult easy|easier|easiest|simple|easily
strong|stronger|strongest weak|weaker|weakest
rich|richer|richest|wealthy poor|poorer|poorest
old|older|oldest young|younger|youngest
old|older|oldest new|newer|newest
early|earlier|earliest late|later|latest
heavy|heavier|heaviest light|lighter|lightest
deep|deeper shallow
wide|wider narrow
thick|thicker thin|thinner
bright|brighter dark|darker|dim
clean dirty|filthy
dry wet
full empty
loud quiet|silent
hard soft
rough smooth
sharp|smart|clever|intelligent dull|stupid|dumb
happy sad|unhappy|miserable
safe|safely dangerous|unsafe|risky
healthy unhealthy|sick|ill
cheap expensive|costly
common rare
near|nearer|nearest|close|closer|closest far|farther|farthest|distant
true false|untrue
right wrong
right left
correct incorrect|wrong
legal illegal|unlawful
moral immoral
possible impossible
positive negative
maximum|max|maximise|maximize minimum|min|minimise|minimize
increase|grow|raise|rise|gain|boost decrease|shrink|lower|reduce|drop|fall|lose|decline
active passive|inactive
optimistic pessimistic
polite rude|impolite
progressive|liberal conservative
brave|courageous cowardly|fearful
humble arrogant|proud
generous stingy|selfish|greedy
calm nervous|anxious|agitated
kind cruel|mean
lazy hardworking|diligent
honest dishonest|lying
confident shy|insecure
religious atheist|secular
careful careless|reckless
patient impatient
public private
major minor
modern ancient|traditional
natural artificial
single married
guilty innocent
alive dead
awake asleep
present absent
permanent temporary
internal external
domestic foreign
formal informal|casual
direct indirect
visible invisible|hidden
useful useless
harmful harmless|beneficial
"""

# Opposites that no negation brings together: other direction, other party, other time.
SIDES = """
before|prior after|afterwards|following
until|till since
past future
first last|final
start|begin|open|launch stop|end|finish|quit|close
open|unlock close|shut|lock
enable|activate disable|deactivate
allow|permit|accept|approve forbid|prohibit|deny|reject|refuse|block|ban
add|insert|attach remove|delete|detach|subtract
install uninstall
on off
up down
in|inside|into out|outside
over|above under|below|beneath
buy|purchase sell
import export
upload download
push pull
push pop
send receive|get
give|lend|donate take|borrow
win lose
love|like hate|dislike
create|make|build|construct destroy|break|demolish
connect disconnect
join|enter leave|exit
arrive depart|leave
attack defend
teach learn
hire fire
encrypt decrypt
encode decode
compress decompress|extract
mount unmount
subscribe unsubscribe
follow unfollow
include exclude
cause cure|prevent
cause effect
win|success|succeed fail|failure
advantage|benefit|pro|pros|strength disadvantage|drawback|con|cons|weakness|downside
profit loss
credit debit
import export
input output
male female
man|men woman|women|lady
boy|boys girl|girls
boyfriend girlfriend
husband wife
father|dad|daddy mother|mom|mum|mommy
son daughter
brother sister
king queen
actor actress
north south
east west
left right
top bottom
front back
morning|dawn evening|night
day night
summer winter
spring autumn
sunrise sunset
question answer
employer employee
landlord tenant
buyer seller
teacher student
doctor patient
debtor creditor
parent|parents child|children
plural singular
verb noun
vertical horizontal
clockwise counterclockwise|anticlockwise
ascending descending
celsius fahrenheit
asset liability
supply demand
union intersection
acid base
introvert extrovert
veg|vegetarian nonveg
democrat|democrats|democratic republican|republicans
"""

# A line's words may stand for each other where only one word of a sentence is another.
SYNONYMS = """
make create build develop produce
improve increase boost enhance raise
start begin commence
get obtain acquire gain
buy purchase
find determine identify discover
fix repair solve resolve
remove delete erase eliminate
big large huge
fast quick rapid
smart clever intelligent
happy glad joyful
grateful thankful
angry furious mad
sad unhappy
brave courageous
rich wealthy
good great best better top nice
important significant crucial
hard difficult tough
easy simple
scary scariest frightening
funny hilarious funniest
kid child children
movie film
photo picture image
job career
company firm
doctor physician
car automobile
phone smartphone mobile
money cash
reason cause
way method
tip trick suggestion advice
buy get
people person
guy man men
girl woman women
effect impact
benefit advantage
use usage purpose
meaning definition
kind type sort
legit legitimate real
cause lead
"""

NEGATIONS = """
not no never none nobody nothing nowhere neither nor without cannot cant dont doesnt didnt isnt arent wasnt werent wont
wouldnt shouldnt couldnt hasnt havent hadnt hardly barely scarcely lack lacks lacking
"""
OPPOSING_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "de", "anti", "mis", "counter")

# word=number, as digits where a question may have either
NUMBERS = """
zero=0 two=2 three=3 four=4 five=5 six=6 seven=7 eight=8 nine=9 ten=10 eleven=11 twelve=12 thirteen=13 fourteen=14
fifteen=15 sixteen=16 seventeen=17 eighteen=18 nineteen=19 twenty=20 thirty=30 forty=40 fifty=50 sixty=60 seventy=70
eighty=80 ninety=90 hundred=100 thousand=1000 million=1e6 billion=1e9 trillion=1e12 dozen=12 half=1/2 halves=1/2
quarter=1/4 twice=x2 double=x2 thrice=x3 triple=x3 second=#2 third=#3 fourth=#4 fifth=#5 sixth=#6 seventh=#7 eighth=#8
ninth=#9 tenth=#10
"""
NUMBER_WORDS = dict(pair.split("=") for pair in NUMBERS.split())

UNIT_WORDS = """
inch inches in cm mm m km meter meters metre metres kilometer kilometers mile miles foot feet yard yards gram grams g kg
kilogram kilograms kilo kilos pound pounds lb lbs ounce ounces oz ton tons tonne tonnes liter liters litre litres ml
gallon gallons cup cups celsius fahrenheit kelvin degree degrees percent % $ € £ ₹ usd eur gbp inr dollar dollars euro
euros rupee rupees cent cents second seconds sec minute minutes min hour hours hr day days week weeks month months year
years decade century am pm gb mb kb tb ghz mhz hz watt watts kw volt volts amp amps calorie calories lakh lakhs crore
crores kmh mph
"""
DATES = """
january february march april june july august september october november december monday tuesday wednesday thursday
friday saturday sunday christmas easter halloween ramadan diwali
"""

PAST = "was were did had"
FUTURE = "will shall gonna ll wont"

PRONOUN_GENDER = {
    **dict.fromkeys(("he", "him", "his", "himself"), "m"),
    **dict.fromkeys(("she", "her", "hers", "herself"), "f"),
}

# Words that change no answer where they are put in between.
FILLERS = """
really actually very just somehow truly literally basically simply please kindly fact quite rather indeed exactly ever
even still also too so well hi hello hey thanks thank ok okay anyway possibly maybe perhaps certain particular
"""

FUNCTION_WORDS = """
a an the this that these those of to in on at by for from with as into about and or but if than then so is am are was
were be been being do does did done have has had having can could will would shall should may might must i me my you
your we our us they them their it its he him his she her there here what which who whom whose how when where why one
someone somebody anyone people some any all each every both s t re ve d ll m
"""

# Between two things that are joined so, their order says nothing.
JOINING = "and or nor vs versus with either both neither a an the between than"
SYMMETRIC = """
dating married marry marrying friend friends related equal similar same different difference close near engaged
acquaintance acquainted colleague colleagues sibling siblings cousin cousins neighbor neighbour neighbors neighbours
partner partners divorced identical connected adjacent parallel meeting versus vs compatible
"""

VOLATILE = """
today tonight now yesterday tomorrow latest current currently recent recently nowadays weather forecast news breaking
upcoming
"""
ACCOUNT_NOUNS = """
account accounts order orders balance bill bills invoice invoices password passwords subscription delivery parcel ticket
tickets booking bookings appointment appointments meeting meetings calendar email emails inbox message messages card
cards payment payments refund transaction transactions statement payslip address phone location name username profile
file files folder document documents report data contract policy claim device device's order's prescription salary
"""
COMMANDS = """
translate translation summarize summarise summary rewrite rephrase paraphrase reword proofread shorten correct edit
extract classify transcribe convert continue complete fill
"""
MATHS = "calculate compute solve integrate integral derivative differentiate simplify factorize factorise equation"
