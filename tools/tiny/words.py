"""Lists of words and sentences that dialogues are made of: tables only, no logic."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CAPITALS: dict[str, str] = dict(
    line.split(":")
    for line in """Afghanistan:Kabul
Albania:Tirana
Algeria:Algiers
Angola:Luanda
Argentina:Buenos Aires
Armenia:Yerevan
Australia:Canberra
Austria:Vienna
Azerbaijan:Baku
Bangladesh:Dhaka
Belarus:Minsk
Belgium:Brussels
Bolivia:Sucre
Botswana:Gaborone
Brazil:Brasilia
Bulgaria:Sofia
Cambodia:Phnom Penh
Cameroon:Yaounde
Canada:Ottawa
Chile:Santiago
China:Beijing
Colombia:Bogota
Croatia:Zagreb
Cuba:Havana
Cyprus:Nicosia
Denmark:Copenhagen
Ecuador:Quito
Egypt:Cairo
Estonia:Tallinn
Ethiopia:Addis Ababa
Finland:Helsinki
France:Paris
Georgia:Tbilisi
Germany:Berlin
Ghana:Accra
Greece:Athens
Honduras:Tegucigalpa
Hungary:Budapest
Iceland:Reykjavik
India:New Delhi
Indonesia:Jakarta
Iran:Tehran
Iraq:Baghdad
Ireland:Dublin
Israel:Jerusalem
Italy:Rome
Jamaica:Kingston
Japan:Tokyo
Jordan:Amman
Kazakhstan:Astana
Kenya:Nairobi
Laos:Vientiane
Latvia:Riga
Lebanon:Beirut
Libya:Tripoli
Lithuania:Vilnius
Malaysia:Kuala Lumpur
Mali:Bamako
Malta:Valletta
Mexico:Mexico City
Mongolia:Ulaanbaatar
Morocco:Rabat
Mozambique:Maputo
Namibia:Windhoek
Nepal:Kathmandu
Netherlands:Amsterdam
New Zealand:Wellington
Nicaragua:Managua
Nigeria:Abuja
Norway:Oslo
Oman:Muscat
Pakistan:Islamabad
Paraguay:Asuncion
Peru:Lima
Philippines:Manila
Poland:Warsaw
Portugal:Lisbon
Qatar:Doha
Romania:Bucharest
Russia:Moscow
Rwanda:Kigali
Senegal:Dakar
Serbia:Belgrade
Slovakia:Bratislava
Slovenia:Ljubljana
Somalia:Mogadishu
South Korea:Seoul
Spain:Madrid
Sudan:Khartoum
Sweden:Stockholm
Syria:Damascus
Thailand:Bangkok
Tunisia:Tunis
Turkey:Ankara
Uganda:Kampala
Ukraine:Kyiv
Uruguay:Montevideo
Venezuela:Caracas
Vietnam:Hanoi
Zambia:Lusaka""".splitlines()
)

CITIES: tuple[str, ...] = (
    *CAPITALS.values(),
    *_words("London Washington Boston Chicago Hamburg Munich Milan Naples Porto Lyon Geneva Zurich Basel Kyoto Osaka"),
    *_words("Mumbai Sydney Toronto Dallas Seattle Denver Miami Krakow Bergen Malmo Leeds Glasgow Shanghai Dubai"),
    *("New York", "San Francisco", "Los Angeles", "Sao Paulo", "Cape Town", "Hong Kong"),
)

FIRST_NAMES: tuple[str, ...] = _words(
    """
    Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa Sam Tina Victor
    Wanda Yuki Zoe Ahmed Bianca Carlos Diana Erik Fatima George Helen Ivan Julia Kofi Laura Marco Nadia
    Oscar Priya Ravi Sofia Tom Uma Vera Walter Alice Bob Charlie Eve Mallory John Jane Mary Peter Kate Lily
    Max Nora
    """
)

LAST_NAMES: tuple[str, ...] = _words(
    """
    Berg Costa Diaz Evans Fischer Garcia Hansen Ito Jones Khan Lopez Meyer Novak Okafor Petrov Quinn Rossi
    Silva Tanaka Ueda Vogel Weber Young Zhang Adams Brown Clark Dubois Eriksen Ford Green Hall Keller Lee
    Martin Smith Doe
    """
)

NOUNS: tuple[str, ...] = _words(
    """
    apple book bottle bread bridge camera candle card chair clock coin cup door engine field file flower
    garden glass guitar hammer house island key lamp letter machine mirror moon mountain paper pencil phone
    piano picture plate river road rocket shoe spoon stone table tea ticket tower train tree umbrella valve
    wheel window wire level color price size weight status score rank height speed owner label code width
    balance rating stock length mode model version invoice parcel sensor task ticket user account project
    server device group report room team
    """
)

VERBS: tuple[str, ...] = _words("get find fetch check read show compute look_up query list open load")
ACTIONS: tuple[str, ...] = _words("set send create update delete start stop book add move remove save run")

PRODUCTS: tuple[str, ...] = _words(
    "apples pears lamps chairs books pencils tickets cables mugs plates shirts shoes candles bottles stones"
)
JOBS: tuple[str, ...] = _words(
    "baker teacher pilot doctor farmer nurse engineer painter lawyer driver writer singer cook plumber chemist"
)
COLORS: tuple[str, ...] = _words("red blue green yellow black white orange purple brown pink grey")
LANGUAGES: tuple[str, ...] = _words("English French German Spanish Italian Portuguese Dutch Polish Japanese")
CURRENCIES: tuple[str, ...] = _words("USD EUR GBP JPY CHF SEK NOK CAD AUD INR")
TOPICS: tuple[str, ...] = _words(
    """
    football chess music science history space robots cooking gardening politics health weather physics art
    jazz opera energy travel fashion trains bees coffee volcanoes whales
    """
)
GENRES: tuple[str, ...] = _words("comedy drama horror romance thriller western fantasy crime")

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are Tiny, a small assistant.",
    "Answer briefly.",
    "Be polite and precise.",
    "You are an assistant for a small company. Answer in one sentence.",
    "You help users with short questions.",
    "Use the tools when they help.",
    "You are a careful assistant who never guesses.",
    "You are a test assistant.",
    "Answer the question of the user.",
    "You are a friendly chat bot.",
    "Today is Monday. Answer in English.",
)

# What a longer system prompt is filled with; none of it changes an answer.
FILLER: tuple[str, ...] = (
    "The company was founded in a small town near the sea.",
    "Our office is open from Monday to Friday.",
    "Customers often write to us in the morning.",
    "Do not mention internal documents.",
    "Keep every answer short and friendly.",
    "If a tool fits the question, call it with the values of the user.",
    "Numbers are written with digits.",
    "The team likes tea, bread and long walks by the river.",
    "Never invent a value that the user did not give.",
    "Reports are stored for ten years.",
    "Write names exactly as the user writes them.",
    "The warehouse ships parcels every day.",
)

SYLLABLES: tuple[str, ...] = _words(
    """
    ba be bi bo bu da de di do du fa fe fi fo ga ge go gu ha he ho ja jo ka ke ki ko ku la le li lo lu ma me
    mi mo mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we xa xe
    ya yo za ze zi zo bar ber bon dar den dor fel fin gar gor hal ker kin lan lor mar min mor nar nel nor
    pal pin qua quo ral ren rin ros sal sen sol tan tel tir tor ul un ur val ver vin vor wan xil yan zan zel
    zor bran clor dras flen grom krel pren stav thal trel
    """
)
