// k6 posts at a fixed rate, however long the answers take: what waits is not hidden.
import http from "k6/http";
import { SharedArray } from "k6/data";
import exec from "k6/execution";

const deliveries = new SharedArray("deliveries", () => JSON.parse(open(__ENV.DELIVERIES)));

export const options = {
  scenarios: {
    arrivals: {
      executor: "constant-arrival-rate",
      rate: Number(__ENV.RATE),
      timeUnit: "1s",
      duration: `${__ENV.SECONDS}s`,
      preAllocatedVUs: 64,
      maxVUs: 256,
    },
  },
  summaryTrendStats: ["med", "p(99)", "p(99.9)", "max"],
  noConnectionReuse: false,
};

export default function () {
  const one = deliveries[exec.scenario.iterationInTest % deliveries.length];
  http.post(__ENV.URL, one[1], {
    headers: { "Content-Type": "application/json", "Stripe-Signature": one[0] },
  });
}
