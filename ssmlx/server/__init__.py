"""A server for editors, agents and chat pages; needs the extra `server`.

A POST goes `app` -> `fields` -> the API's file (read) -> `handler` -> `request_prompts`, and back
as parts from `choices` through the writer of that API.
"""
