"""A table of common tools and of questions that need them.

A question names its values by the position of the parameter. ``noun`` is what the answer calls the result; a tool
without one does something instead of looking something up.
"""

from typing import NamedTuple


class Param(NamedTuple):
    names: str  # variants, separated by "|"
    type: str  # JSON schema type
    kind: str  # what `values.draw` makes


class Domain(NamedTuple):
    names: str  # variants, separated by "|"
    description: str
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    noun: str = ""


def _s(names: str, kind: str) -> Param:
    return Param(names, "string", kind)


def _i(names: str, kind: str = "int") -> Param:
    return Param(names, "integer", kind)


DOMAINS: tuple[Domain, ...] = (
    Domain(
        "get_weather|get_current_weather|weather|fetch_weather|weather_lookup",
        "Get the current weather in a city|Get the weather|Current weather of a location|Get the current weather",
        (_s("city|location|place|town", "city"),),
        ("What is the weather in {0}?", "What's the weather in {0}?", "How is the weather in {0}?",
         "Tell me the weather in {0}.", "Weather in {0}, please.", "What is the weather like in {0} today?",
         "What's the weather like in {0}?", "Is it raining in {0}?"),
        "weather in {0}",
    ),
    Domain(
        "get_forecast|forecast|weather_forecast", "Get the weather forecast for some days|Weather forecast of a city",
        (_s("city|location|place", "city"), _i("days|num_days", "small")),
        ("What is the forecast for {0} for {1} days?", "Give me the weather forecast for {0} for the next {1} days.",
         "How will the weather in {0} be in the next {1} days?"),
        "forecast for {0}",
    ),
    Domain(
        "get_time|current_time|get_current_time|clock", "Get the current time in a city|Current local time",
        (_s("city|location|timezone|place", "city"),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "What is the time in {0}?", "Current time in {0}?"),
        "time in {0}",
    ),
    Domain(
        "get_stock_price|stock_price|get_quote|lookup_stock",
        "Get the price of a stock|Latest stock price of a company",
        (_s("symbol|ticker|company|stock", "word"),),
        ("What is the stock price of {0}?", "How much is a share of {0}?", "Get the stock price of {0}."),
        "stock price of {0}",
    ),
    Domain(
        "convert_currency|currency_convert|exchange", "Convert an amount between currencies|Currency conversion",
        (_i("amount|value|sum"), _s("from|source|from_currency", "currency"), _s("to|target|to_currency", "currency")),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "What are {0} {1} in {2}?"),
        "value of {0} {1} in {2}",
    ),
    Domain(
        "send_email|send_mail|email|mail", "Send an email to someone|Send a mail with a subject",
        (_s("to|recipient|address|email", "email"), _s("subject|title|topic", "phrase")),
        ("Send an email to {0} with the subject {1}.", "Mail {0} about {1}.", "Write an email to {0} about {1}."),
    ),
    Domain(
        "set_timer|start_timer|timer", "Start a timer|Set a timer in minutes", (_i("minutes|duration", "small"),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes."),
    ),
    Domain(
        "translate|translate_text|translator", "Translate text into a language|Translation of a text",
        (_s("text|phrase|input", "phrase"), _s("language|target|to|target_language", "language")),
        ("Translate {0} into {1}.", "Translate {0} to {1}.", "How do you say {0} in {1}?"),
        "translation of {0}",
    ),
    Domain(
        "search|web_search|search_web|google", "Search the web|Find pages about a topic",
        (_s("query|q|topic|text", "phrase"),),
        ("Search the web for {0}.", "Search for {0}.", "Find pages about {0}.", "Look up {0} on the web."),
        "result for {0}",
    ),
    Domain(
        "book_flight|flight|reserve_flight", "Book a flight|Book a flight between two cities",
        (_s("from|origin|departure|source", "city"), _s("to|destination|arrival", "city")),
        ("Book a flight from {0} to {1}.", "I want to fly from {0} to {1}.", "Reserve a flight from {0} to {1}."),
    ),
    Domain(
        "get_distance|distance|route_length", "Get the distance between two cities|Distance in km between two places",
        (_s("from|start|origin|a", "city"), _s("to|end|destination|b", "city")),
        ("How far is it from {0} to {1}?", "What is the distance from {0} to {1}?", "Distance between {0} and {1}?"),
        "distance from {0} to {1}",
    ),
    Domain(
        "get_population|population|count_people", "Get the population of a city|Number of people in a place",
        (_s("city|place|name|location", "city"),),
        ("How many people live in {0}?", "What is the population of {0}?", "Population of {0}?"),
        "population of {0}",
    ),
    Domain(
        "get_order|order_status|track_order|find_order", "Get the status of an order|Track an order",
        (_s("order_id|id|order|number", "id"),),
        ("Where is my order {0}?", "What is the status of order {0}?", "Track order {0}.", "Check order {0}."),
        "status of order {0}",
    ),
    Domain(
        "get_invoice|invoice_total|find_invoice", "Get the total of an invoice|Find an invoice",
        (_i("invoice_id|id|number|invoice"),),
        ("What is the total of invoice {0}?", "Find invoice {0}.", "How much is invoice {0}?"),
        "total of invoice {0}",
    ),
    Domain(
        "set_light|set_lamp|light_color|change_light", "Set the color of a light|Change the light in a room",
        (_s("room|place|name", "noun"), _s("color|colour", "color")),
        ("Set the light in the {0} to {1}.", "Make the lamp in the {0} {1}.", "Turn the {0} light {1}."),
    ),
    Domain(
        "set_volume|volume|change_volume", "Set the volume of the speaker|Change the volume",
        (_i("level|volume|percent", "small"),),
        ("Set the volume to {0}.", "Change the volume to {0}.", "Turn the volume to {0}."),
    ),
    Domain(
        "play_song|play_music|play|music", "Play a song of an artist|Play music",
        (_s("title|song|name", "phrase"), _s("artist|by|singer", "person")),
        ("Play {0} by {1}.", "Play the song {0} by {1}.", "I want to hear {0} by {1}."),
    ),
    Domain(
        "get_news|news|latest_news|headlines", "Get the latest news about a topic|News headlines",
        (_s("topic|subject|about|query", "topic"),),
        ("What is the news about {0}?", "Show me news about {0}.", "Any news about {0}?", "Latest {0} news, please."),
        "news about {0}",
    ),
    Domain(
        "define|dictionary|define_word|lookup_word", "Define a word|Look up a word in a dictionary",
        (_s("word|term|text", "word"),),
        ("What does {0} mean?", "Define {0}.", "Define the word {0}.", "What is the meaning of {0}?"),
        "meaning of {0}",
    ),
    Domain(
        "book_table|reserve_table|restaurant", "Book a table in a restaurant|Reserve a table",
        (_s("restaurant|name|place", "word"), _i("people|guests|seats|persons", "small"), _s("time|at|hour", "time")),
        ("Book a table at {0} for {1} people at {2}.", "Reserve a table for {1} at {0} at {2}."),
    ),
    Domain(
        "create_event|add_event|calendar|schedule_meeting", "Create an event in the calendar|Schedule a meeting",
        (_s("title|name|event|subject", "phrase"), _s("date|day|when", "date")),
        ("Create an event {0} on {1}.", "Add {0} to my calendar on {1}.", "Schedule {0} on {1}."),
    ),
    Domain(
        "find_movie|search_movie|movies", "Find a movie of a genre|Search movies by genre and year",
        (_s("genre|type|kind", "genre"), _i("year|from_year", "int")),
        ("Find a {0} movie from {1}.", "Search for a {0} movie of {1}.", "Which {0} movies came out in {1}?"),
        "{0} movie from {1}",
    ),
    Domain(
        "get_user|find_user|lookup_user|user_info", "Get data of a user|Find a user by name",
        (_s("name|user|username|user_name", "person"),),
        ("Find the user {0}.", "Who is {0}?", "Get the data of {0}.", "How old is {0}?"),
        "data of {0}",
    ),
    Domain(
        "add_to_cart|buy|order_product|add_item", "Add a product to the cart|Buy a product",
        (_s("product|item|name|article", "product"), _i("quantity|count|amount|number", "small")),
        ("Add {1} {0} to my cart.", "Buy {1} {0}.", "I need {1} {0}.", "Order {1} {0}, please."),
    ),
    Domain(
        "read_file|open_file|cat|get_file", "Read a file|Return the content of a file",
        (_s("path|file|name|filename", "word"),),
        ("Read the file {0}.", "Open the file {0}.", "What is in the file {0}?", "Show me the file {0}."),
        "content of {0}",
    ),
)  # fmt: skip
