// Reads a JSON list of custom resources; prints for each what its schema says, null where it is valid.
import * as gateway from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
import * as keda from "@kubernetes-models/keda/keda.sh/v1alpha1";
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
import { readFileSync } from "node:fs";

const kinds = { ...gateway, ...keda, ...monitoring };
const said = JSON.parse(readFileSync(0, "utf8")).map((resource) => {
  try {
    new kinds[resource.kind](resource).validate();
    return null;
  } catch (error) {
    return `${resource.kind}: ${error.message}`;
  }
});
console.log(JSON.stringify(said));
