"""How families of models write their answers: thoughts, texts and tool calls.

A form of calls is one `CallForm`, by its name in `families.CALL_FORMS`: its marks, its reader, and
its grammar.
"""
