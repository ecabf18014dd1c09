#!/usr/bin/env bash
# Run the services on hosts of their own, each scaled on its own.
#
#   on the first host     examples/two_hosts.sh target
#   on the second host    examples/two_hosts.sh draft
#   on either host        examples/two_hosts.sh orchestrator first:50052 second:50053
#
# Before, on every host: export COPPICE_SECRET_FILE=FILE, the same secret everywhere (openssl rand -hex 32).
# The orchestrator takes clients of its own host; docs/security.md says how to let others in.
#
# More of a role: one more port, or one more host, in the comma-separated list of the orchestrator.
# COPPICE_TARGET_MODEL, COPPICE_DRAFT_MODEL: checkpoints; the bundled ones if not set.
set -eu
target=${COPPICE_TARGET_MODEL:-demo} draft=${COPPICE_DRAFT_MODEL:-demo}
unset COPPICE_TARGET_MODEL COPPICE_DRAFT_MODEL # `coppice serve` reads variables of these names too

case ${1:-} in
target)
  exec coppice serve target --host 0.0.0.0 --port "${PORT:-50052}" --model "$target" --draft-model "$draft"
  ;;
draft)
  exec coppice serve draft --host 0.0.0.0 --port "${PORT:-50053}" --model "$draft" --target-model "$target"
  ;;
orchestrator)
  [ $# -eq 3 ] || { echo "usage: $0 orchestrator TARGETS DRAFTS" >&2; exit 2; }
  exec coppice serve orchestrator --port "${PORT:-50051}" --model "$target" --targets "$2" --drafts "$3"
  ;;
*)
  echo "usage: $0 target | draft | orchestrator TARGETS DRAFTS" >&2
  exit 2
  ;;
esac
