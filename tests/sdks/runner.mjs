// Runs the senders' libraries for tests: a call as a line of JSON in, its result as a line out.
import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { sign, verify } from "@octokit/webhooks-methods";
import "@shopify/shopify-api/adapters/node";
import { shopifyApi } from "@shopify/shopify-api";
import { verifyKey } from "discord-interactions";
import { Webhook } from "standardwebhooks";

const examples = new URL(
  "./node_modules/@octokit/webhooks-examples/api.github.com/index.json",
  import.meta.url,
);

const calls = {
  octokitSign: ({ secret, body }) => sign(secret, body),
  octokitVerify: ({ secret, body, signature }) => verify(secret, body, signature),
  octokitExamples: async () => JSON.parse(await readFile(examples, "utf8")),
  shopifyVerify: async ({ secret, body, headers }) => {
    const shopify = shopifyApi({
      apiSecretKey: secret,
      apiKey: "key",
      apiVersion: "2025-07",
      hostName: "hooks.example.com",
      isEmbeddedApp: false,
      logger: { level: 0, log: () => {} },
    });
    const rawRequest = { method: "POST", url: "/webhooks/shopify", headers };
    const found = await shopify.webhooks.validate({ rawBody: body, rawRequest, rawResponse: {} });
    return found.valid;
  },
  discordVerify: ({ publicKey, body, signature, timestamp }) =>
    verifyKey(body, signature, timestamp, publicKey),
  standardSign: ({ secret, body, id, timestamp }) =>
    new Webhook(secret).sign(id, new Date(timestamp * 1000), body),
  standardVerify: ({ secret, body, headers }) => {
    try {
      new Webhook(secret).verify(body, headers);
      return true;
    } catch {
      return false;
    }
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { call, given } = JSON.parse(line);
  try {
    console.log(JSON.stringify({ result: await calls[call](given) }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
