"""Posts one signed event of the type that the probing handler takes: SECRET EVENT."""

import hashlib
import hmac
import http.client
import json
import sys
import time

secret, event = sys.argv[1:]
data = {"object": {"id": event, "object": "invoice"}}
body = json.dumps(
    {"id": event, "object": "event", "type": "invoice.updated", "livemode": False, "data": data}
).encode()
at = int(time.time())
signed = hmac.new(secret.encode(), b"%d.%s" % (at, body), hashlib.sha256).hexdigest()
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=30)
connection.request("POST", "/webhooks/stripe", body, {"Stripe-Signature": f"t={at},v1={signed}"})
answer = connection.getresponse()
print(answer.status, answer.read().decode().strip())
