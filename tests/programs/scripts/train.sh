#!/bin/bash
# A wrapper as people write them: settings, a folder, the program.
set -e
export COLOUR_OF_THE_WRAPPER=blue
python "$(dirname "$0")/bystander.py" "$@"
echo "done"
