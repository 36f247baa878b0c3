# Debian trees that run under a real systemd. Read by `run`; wants root, systemd-container, debootstrap.

# The mirror that this machine's own apt uses.
mirror() {
  apt-get indextargets --format '$(LABEL) $(SUITE) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
    awk '$1 == "Debian" { print $NF; exit }'
}

# A bare tree of a release, made once in $TREES; nothing of ours is in it.
tree() {
  local suite=$1 bare=$TREES/$1
  [[ -e $bare/.complete ]] && return
  rm -rf "$bare" && mkdir -p "$TREES"
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,ca-certificates,iproute2,curl \
    "$suite" "$bare" "$(mirror)" >"$TREES/$suite.log" 2>&1 ||
    fail "debootstrap of $suite failed: see $TREES/$suite.log"
  touch "$bare/.complete"
}

# Boots a copy of the tree $1 that is thrown away afterwards, with $2 as /share. Sets LEADER.
boot() {
  local suite=$1 share=$2 hierarchy
  ROOT=$WORK/$suite
  mkdir -p "$ROOT"
  mount -t tmpfs none "$ROOT"
  mkdir "$ROOT"/{upper,work,tree}
  mount -t overlay overlay -o "lowerdir=$TREES/$suite,upperdir=$ROOT/upper,workdir=$ROOT/work" "$ROOT/tree"
  # A cgroup of its own in each hierarchy: in a shared one two managers stop each other's units.
  for hierarchy in /sys/fs/cgroup/{unified,systemd,}; do
    [[ -w $hierarchy/cgroup.procs ]] && mkdir -p "$hierarchy/receiver-test-$$"
  done
  (
    for hierarchy in /sys/fs/cgroup/{unified,systemd,}; do
      [[ -d $hierarchy/receiver-test-$$ ]] && echo "$BASHPID" >"$hierarchy/receiver-test-$$/cgroup.procs"
    done
    # It must not outlive us, however we end.
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 exec setpriv --pdeathsig TERM systemd-nspawn --quiet --boot --directory="$ROOT/tree" \
      --machine="receiver-test-$$" --register=no --keep-unit --private-network --link-journal=no \
      --capability=all --bind-ro="$share:/share"
  ) </dev/null >"$WORK/console" 2>&1 &
  NSPAWN=$!
  wait_for 20 'LEADER=$(pgrep -P $NSPAWN -x systemd)' || fail "$suite did not start: $(tail -n 5 "$WORK/console")"
  wait_for 60 '[[ $(in_it systemctl is-system-running 2>/dev/null) =~ running|degraded ]]' ||
    fail "$suite is not up: $(tail -n 5 "$WORK/console")"
}

# Runs a command inside.
in_it() {
  nsenter --target "$LEADER" --mount --pid --net --ipc --uts --cgroup -- \
    env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
}

# Runs a command of this machine on the container's network.
near_it() {
  nsenter --target "$LEADER" --net -- "$@"
}

power_off() {
  [[ -n ${NSPAWN:-} ]] || return 0
  # SIGRTMIN+4: power off. systemd(1)
  [[ -n ${LEADER:-} ]] && kill -s RTMIN+4 "$LEADER" 2>/dev/null
  wait_for 20 '! kill -0 $NSPAWN 2>/dev/null' || kill -KILL "$NSPAWN" 2>/dev/null
  wait "$NSPAWN" 2>/dev/null || true
  umount -R "$ROOT/tree" "$ROOT" 2>/dev/null || umount -R -l "$ROOT" 2>/dev/null || true
  find /sys/fs/cgroup/{unified,systemd,}/receiver-test-$$ -depth -type d -exec rmdir {} + 2>/dev/null || true
  NSPAWN='' LEADER=''
}

# Waits up to $1 seconds until the words $2 hold; PATIENCE times as long on a machine that is busy.
wait_for() {
  local until=$((SECONDS + $1 * ${PATIENCE:-3}))
  until eval "$2"; do
    ((SECONDS < until)) || return 1
    sleep 0.05
  done
}

fail() {
  echo "systemd-test: $1" >&2
  exit 1
}
