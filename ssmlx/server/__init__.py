"""A server for editors, agents and chat pages; needs the extra `server`.

A POST goes `app` -> `fields` -> the API's file (read) -> `handler` -> `request_prompts`, and back
as parts from `choices` through the writer of that API.

| file | what it has |
|---|---|
| `__main__.py` | the command: options, the engine, the socket |
| `app.py` | routes, hosts and keys, responses and errors as HTTP |
| `fields.py` | which fields of a request are followed, ignored or refused |
| `completions.py` | reads and writes OpenAI's chat and text completions |
| `messages.py` | reads and writes Anthropic's messages |
| `responses.py` | reads and writes OpenAI's responses |
| `typed_blocks.py` | what these two share: lists of typed blocks, translated into a chat |
| `requests.py` | `AnswerRequest`, a request of any API; the parts of its answer |
| `request_prompts.py` | a request's turns or texts as tokens, and the settings of its answer |
| `handler.py` | `RequestHandler`: answers requests with an engine, a bounded number at once |
| `text_lengths.py` | which texts are too long for the context, by their bytes |
| `concurrency.py` | threads that read, slots for open answers; a request's choices as one stream |
| `connections.py` | connections that end in time, and are not too many |
| `choices.py` | an answer's segments as text, reasoning and tool calls |
| `logprobs.py` | log probabilities as OpenAI's chats have them |
| `grammars.py` | forms that an answer is held to, by llguidance |
| `tool_choice.py` | which tools are offered, and whether one has to be called |
| `thought_limit.py` | ends thoughts before a form, so that the form still fits |
"""
