#!/usr/bin/env bash
# negotiation.sh [DIR]: four agents settle the use of a river in five phases. It leaves all its files in DIR.
set -euo pipefail
dir=${1:-$(mktemp -d)}
export AMEM_STORE=$dir/store AMEM_MODEL=${AMEM_MODEL:-gemma-3-270m} AMEM_QUIET=1
agents=(mediator miller fisher town)

for day in $(seq 12); do
  echo "Day $day: $((60 - 3 * day)) centimetres at the weir, $((4 * day)) salmon counted, the mill ran $day hours."
done > "$dir/record.txt"
printf '%s\n' "You lead the talks. You want an agreement that all can keep." > "$dir/mediator.txt"
printf '%s\n' "You own the mill. You need 40 centimetres of water for 8 hours a day." > "$dir/miller.txt"
printf '%s\n' "You fish the river. The salmon need an open weir at night." > "$dir/fisher.txt"
printf '%s\n' "You speak for the town. It drinks from the river, and can pay for a gate." > "$dir/town.txt"
for agent in "${agents[@]}"; do
  amem prefill "$agent" "$dir/record.txt" "$dir/$agent.txt" --domain talks --json
done > "$dir/results.jsonl"

phase() { # phase LABEL SPEAKER REQUEST: SPEAKER answers, and all others read the answer
  amem chat "$2" "$3" --max-tokens 16 --seed 1 --json | tee -a "$dir/results.jsonl" |
    jq -r '"\(.agent) said: \(.text)"' > "$dir/$1.txt"
  for agent in "${agents[@]}"; do
    [ "$agent" = "$2" ] || amem extend "$agent" "$dir/$1.txt" --phase "$1" --json >> "$dir/results.jsonl"
  done
}

phase opening mediator "Say what is to be settled."
phase claim miller "Say what you need, and why."
phase answer fisher "Answer the miller."
phase offer town "Offer something that helps both."
phase agreement mediator "Write down what was agreed."

amem log town --json | jq -r 'select(.type == "commit") | .turns[] | select(.label) | "\(.label) \(.end - .start)"'

for agent in "${agents[@]}"; do
  amem inspect "$agent" --json | jq 'select(.type == "result") | .cached'
done | jq -s --slurpfile results "$dir/results.jsonl" '{
  cached: add,
  prefilled: ($results | map(.prefilled) | add),
  generated: ($results | map(select(.generated > 0) | .generated - 1) | add),
  shared: ($results | map(select(.command == "prefill") | .reused) | add)
} | . + {fed_twice: (.prefilled + .generated + .shared - .cached)}' | tee "$dir/sum.json"
