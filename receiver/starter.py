"""Writes the files that a new set-up begins with."""

import os
from pathlib import Path

CONFIG_NAME = "receiver.toml"
HANDLERS_NAME = "handlers.py"
ENV_NAME = ".env"
IGNORE_NAME = ".gitignore"

SECRET_NAME = "STRIPE_WEBHOOK_SECRET"  # noqa: S105  a name, not a secret

#: Other set-ups, in examples/NAME.toml, each with the name of its secret.
EXAMPLES = {"feedback": "FEEDBACK_WEBHOOK_SECRET"}

CONFIG = """\
# Receiver's configuration. `receiver check` says what is wrong with it, all at once.
# Relative paths begin at this file's folder. Secrets are never written here, only named:
#     env:NAME           a variable, or a line of env_file
#     file:/path         a file that only the service may read
#     credential:NAME    what systemd's LoadCredential= passes

database = "receiver.db"
env_file = ".env"
# handlers = "handlers.py"                  # Python effects, see the example beside this file
# public_url = "https://hooks.example.com"  # where senders reach this server

[server]
listen = "127.0.0.1:8080"                   # or "unix:/run/receiver/http.sock"
admin = "127.0.0.1:8081"                    # /healthz and /readyz, for this machine alone
# trusted_proxies = ["127.0.0.1"]           # whose X-Forwarded-For counts

# [worker]                                  # applies queued events, and sends what rules owe
# run = "inside"                            # or "separate" (receiver work), or "off"
# threads = 2


# Stripe: the address to enter there is <public_url>/webhooks/stripe, and the signing secret
# it shows goes into .env. Send it the event types that the rules below name.

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE_WEBHOOK_SECRET"]     # while rotating: the new one and the old one
livemode = @LIVEMODE@
# mode = "queued"                           # answered at once, and applied by the worker
# api = { key = "env:STRIPE_API_KEY" }      # to find what never came: receiver reconcile stripe

# Who a customer is: set client_reference_id to your own id for the tenant when you create the
# Checkout Session. An invoice that comes first waits, parked, until the link is there. Of several
# paths the first that is not null counts: here an expanded object's id, or the plain id.

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link.customer = ["data.object.customer.id", "data.object.customer"]
link.workspace = "data.object.client_reference_id"

# Credits for a paid invoice, once per invoice, however many events tell of it. The names of
# operations are part of what is remembered: renaming one would grant again.

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid", "invoice.payment_succeeded"]
# Not met: the rule does not apply.
when = { "data.object.amount_paid" = { gt = 0 } }
# Not met: the event is quarantined, for you to look at.
expect = { "data.object.status" = "paid", "data.object.currency" = ["usd", "eur"] }
subject = "data.object.id"
customer = ["data.object.customer.id", "data.object.customer"]
grant = { unit = "credits", amount = 100 }
# A message with it, once per invoice, too; see the destinations at the end of this file.
# send = [{ to = "confirmation" }]
# By price instead, wherever the version of Stripe's API has it (it moved on 2025-03-31):
# grant.unit = "credits"
# grant.by = [
#   "data.object.lines.data[0].pricing.price_details.price.id",
#   "data.object.lines.data[0].pricing.price_details.price",
#   "data.object.lines.data[0].price.id",
# ]
# grant.amounts.price_basic = 100
# grant.amounts.price_pro = 500

# A credit note takes back what is left of its invoice's grant. For a part of it name an amount,
# in credits: reverse.amount = "data.object.metadata.credits".

[[rules]]
operation = "refund-credit-grant"
source = "stripe"
on = ["credit_note.created"]
subject = "data.object.id"
reverse.operation = "initial-credit-grant"
reverse.subject = ["data.object.invoice.id", "data.object.invoice"]

# A statement on a table of your own, in the same transaction; `database` is then the app's file.
# [[rules]]
# operation = "upgrade-plan"
# source = "stripe"
# on = ["customer.subscription.updated"]
# customer = "data.object.customer"
# sql = ['''
#   update workspaces set plan = {data.object.items.data[0].price.lookup_key}
#   where id = {_workspace}
# ''']

# A function of handlers.py; set `handlers` above.
# [[rules]]
# operation = "welcome-bonus"
# source = "stripe"
# on = ["checkout.session.completed"]
# subject = "data.object.id"
# customer = "data.object.customer"
# call = "welcome_bonus"

# Only a message, and no effect.
# [[rules]]
# operation = "tell-of-cancellation"
# source = "stripe"
# on = ["customer.subscription.deleted"]
# subject = "data.object.id"
# send = [{ to = "slack" }, { to = "app" }]


# GitHub: the secret is the webhook's own, and the content type may be either.

# [sources.github]
# scheme = "github"
# secrets = ["env:GITHUB_WEBHOOK_SECRET"]
#
# [[rules]]
# operation = "note-release"
# source = "github"
# on = ["release"]
# when = { "action" = "published" }
# subject = "release.id"
# record = { kind = "release", data = { tag = "{release.tag_name}", url = "{release.html_url}" } }
#
# [[rules]]
# operation = "deploy"
# source = "github"
# on = ["push"]
# when = { "ref" = "refs/heads/main" }
# subject = "after"
# send = [{ to = "deploy" }]


# Shopify: the secret is the app's client secret. Shop and topic stand in headers that are not
# signed, so name the shop here, and let each rule confirm the topic in the body.

# [sources.shopify]
# scheme = "shopify"
# secrets = ["env:SHOPIFY_CLIENT_SECRET"]
# account = "your-shop.myshopify.com"
#
# [[rules]]
# operation = "note-order"
# source = "shopify"
# on = ["orders/paid"]
# expect = { "financial_status" = "paid" }
# subject = "id"
# record = { kind = "order", data = { total = "{total_price}", currency = "{currency}" } }


# Feedback, as an example of a sender whose contract is not known yet. Nothing below is a fact
# about any product. Before it is used, confirm in the sender's documentation, or with its
# support, and replace what stands in <...>:
#   1. how a delivery is signed: the header, the algorithm, what exactly is signed, and whether
#      a timestamp is part of it (if it follows Standard Webhooks: scheme = "standard-webhooks")
#   2. where the event's id is, whether it is signed, and whether a retry keeps it
#   3. the exact names of the event types
#   4. which field names the thing that happened (the subject), and whether it is unique
#   5. how the sender retries: what it takes for success, how often, for how long
#   6. whether several workspaces share one endpoint, and what tells them apart
#   7. which fields may differ between deliveries of one event (then: volatile)

# [sources.feedback]
# scheme = <from 1 and 2>
# secrets = ["env:FEEDBACK_WEBHOOK_SECRET"]
#
# [[rules]]
# operation = "initial-alert"
# source = "feedback"
# on = [<from 3>]
# subject = <from 4>
# record = { kind = "feedback-alert", data = { text = <from the documentation> } }


# Destinations: where messages go once the change is committed. What a rule sends is tried again
# until it is taken, for three days at most. Each message has a key of its own, which stays the
# same from try to try, so that the other side can tell a second try from a second message. Where
# the outcome of a try is not known, it is tried again; with ambiguous = "review" it waits for you.

# A mail. If the event names no address, the message is given up, never the grant. The line in
# .env is SMTP_URL=smtp://user:password@mail.example.com:587; in a password %40 stands for @.
# [destinations.confirmation]
# kind = "email"
# smtp = "env:SMTP_URL"
# from = "Billing <billing@example.com>"
# to = "{data.object.customer_email}"
# subject = "Invoice {data.object.number}"
# text = "{_grant.amount} {_grant.unit} were added to your workspace."
# ambiguous = "review"

# Slack: an incoming webhook, whose address is a secret.
# [destinations.slack]
# kind = "http"
# url = "env:SLACK_WEBHOOK_URL"
# json = { text = "{_event.type}: {data.object.id}" }

# Discord: a webhook of a channel. Its address is a secret, too.
# [destinations.discord]
# kind = "http"
# url = "env:DISCORD_WEBHOOK_URL"
# json = { content = "{_event.type}: {data.object.id}" }

# ntfy: the topic stands in the message. Whoever knows it can read along.
# [destinations.ntfy]
# kind = "http"
# url = "https://ntfy.sh"
# json = { topic = "your-topic", title = "{_event.type}", message = "{data.object.id}" }

# The app itself: the event and its operation as JSON, signed as Standard Webhooks say. The app
# remembers each Idempotency-Key that it has seen for a day; after that an unknown outcome waits.
# [destinations.app]
# kind = "http"
# url = "http://127.0.0.1:3000/internal/webhooks"
# secret = "env:APP_WEBHOOK_SECRET"
# idempotent_for_s = 86400

# A program of this machine, with the message as JSON on its standard input. One template is one
# argument, and no shell reads it.
# [destinations.deploy]
# kind = "command"
# argv = ["/usr/local/bin/deploy", "{repository.full_name}", "{after}"]
# timeout_s = 600
# attempts_max = 3
"""

HANDLERS = '''\
"""Python effects, named by `call` in receiver.toml.

Each function runs inside the event's transaction: what it writes is committed together with the
event, or not at all, and once for each subject of its rule. So it must be quick, and must not
reach out to the network: tx.send("NAME", data={...}) owes a message to [destinations.NAME], which
the worker sends once all of it is committed.
"""

from receiver import Park, Quarantine

BONUS = 10


def welcome_bonus(event, tx):
    """Grant a bonus with the first checkout of a workspace."""
    session = event.body["data"]["object"]
    if session["mode"] != "subscription":
        raise Quarantine(f"a bonus is for subscriptions, not for mode {session['mode']}")
    if session["payment_status"] == "unpaid":
        raise Park("the session is not paid yet")
    tx.grant("credits", BONUS, workspace=event.workspace, subject=event.workspace)
'''

ENV = """\
# What env: references in receiver.toml name. Keep it out of version control.
"""

IGNORE = """\
.env
*.db*
"""


class Exists(Exception):
    """Files are there already; `paths` names them. Nothing was written."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(", ".join(map(str, paths)))
        self.paths = paths


def write(folder: Path, *, live: bool, secret: str, example: str | None = None) -> list[Path]:
    """Write the files into a folder, made if need be, and return their paths.

    `secret` is a fresh development secret; with `live` an empty line is left for the real one.
    An `example` of EXAMPLES has no handlers. An existing .gitignore is kept as it is. Raises
    Exists, before anything is written, if another of the files is there.
    """
    name = secret_name(example)
    wanted = {
        CONFIG_NAME: (_config(example, live), 0o644),
        HANDLERS_NAME: (HANDLERS, 0o644),
        ENV_NAME: (f"{ENV}{name}={'' if live else secret}\n", 0o600),
        IGNORE_NAME: (IGNORE, 0o644),
    }
    if example is not None:
        del wanted[HANDLERS_NAME]
    there = [folder / name for name in wanted if os.path.lexists(folder / name)]
    ignored = folder / IGNORE_NAME
    if there not in ([], [ignored]):
        raise Exists([path for path in there if path != ignored])
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in wanted if folder / name not in there]
    for path in written:
        _create(path, *wanted[path.name])
    return written


def secret_name(example: str | None) -> str:
    """The variable that the secret is in."""
    return SECRET_NAME if example is None else EXAMPLES[example]


def _config(example: str | None, live: bool) -> str:
    if example is None:
        return CONFIG.replace("@LIVEMODE@", "true" if live else "false")
    return (Path(__file__).with_name("examples") / f"{example}.toml").read_text("utf-8")


def _create(path: Path, text: str, mode: int) -> None:
    # Never through a link, and never over a file that came meanwhile.
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
