"""How families of models write their answers: thoughts, texts and tool calls.

`families.find_format` returns a model's format, `reader.AnswerReader` reads answers in it, and
`answer_grammars` constrains answers to it. A form of calls is one `CallForm`, by its name in
`families.CALL_FORMS`: its marks, its reader, and its grammar.

| file | holds |
|---|---|
| `families.py` | the forms by name, and which one a model has |
| `reader.py` | reads an answer as it comes |
| `history.py` | how earlier answers are passed to templates: ids, thoughts, calls as text |
| `answer_grammars.py` | grammars of whole answers: forced calls, and forms after a thought |
| `channels.py` | answers of several messages with headers: Harmony, Muse Spark |
| `json_calls.py` | calls whose arguments are a JSON object |
| `tagged_calls.py` | calls whose arguments are between tags |
| `bracketed_calls.py` | calls whose arguments are in brackets: Python's, Gemma's |
| `call_form.py` | what a form of calls is |
| `arguments.py` | what a written argument means under its schema |
| `rules.py` | the rules of a grammar |
| `schemas.py` | JSON schemas, prepared for grammars |
| `cursor.py` | a place in a text, and values written in it |
"""
