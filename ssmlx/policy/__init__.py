"""What to draft: costs and acceptance that are learned, and the controller that weighs them.

| file | what it has |
|---|---|
| `controller.py` | `Controller`: what each call of one answer drafts |
| `costs.py` | `CostTable`: plain calls that a call of each kind takes here |
| `acceptance.py` | the part of what is offered that texts accept |
| `offers.py` | the tokens that a call should bring, by nodes |
"""
