//! State that all links of a session share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::desk::Desk;
use super::same_host::Grants;
use super::{Control, Link, Quota, is_same_link};
use crate::config::Config;
use crate::memory::{Registry, Staging, Users};
use crate::stats::Book;
use crate::sync::{Mutex, Rank, RwLock};
use crate::trace::Trace;
use crate::transfer::Run;

/// State that all links of a session share. It is the [`Users`] of the session's registry: a
/// revocation stops copies, grants and links, in this order.
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) registry: Arc<Registry>,
    pub(crate) staging: Staging,
    pub(crate) copies: Copies,
    /// Runs that are copied instead of being sent.
    pub(crate) desk: Desk,
    /// Memory that the session keeps for peers.
    pub(crate) quota: Arc<Quota>,
    pub(crate) control: Arc<dyn Control>,
    /// Counters of all traffic.
    pub(crate) stats: Arc<Book>,
    /// Records events, if a trace was requested.
    pub(crate) trace: Trace,
    /// Every link to another process that may touch memory, including links that have ended or
    /// whose peer was removed, until they are taken apart.
    links: Mutex<Vec<Arc<dyn Link>>>,
    /// Grants to neighbours that may still touch memory.
    grants: Mutex<Vec<Arc<Grants>>>,
    next_id: AtomicU64,
    /// Links with frames that may still wait for others to leave with.
    patient: Mutex<Vec<Weak<dyn Link>>>,
    /// True if there are such links: every call of the application looks at this.
    has_patient: AtomicBool,
}

impl Context {
    pub(crate) fn new(
        config: Config,
        registry: Arc<Registry>,
        staging: Staging,
        control: Arc<dyn Control>,
        desk: Desk,
        trace: &Trace,
    ) -> Arc<Self> {
        let context = Arc::new(Self {
            quota: Quota::new(config.queue_bytes(), Arc::clone(&control)),
            config,
            registry,
            staging,
            copies: Copies {
                copying: RwLock::new(Rank::Copies, ()),
            },
            desk,
            control,
            stats: Arc::default(),
            trace: trace.clone(),
            links: Mutex::new(Rank::Links, Vec::new()),
            grants: Mutex::new(Rank::Links, Vec::new()),
            next_id: AtomicU64::new(1),
            patient: Mutex::new(Rank::Leaf, Vec::new()),
            has_patient: AtomicBool::new(false),
        });
        let users: Arc<dyn Users> = Arc::clone(&context) as Arc<dyn Users>;
        context.registry.set_users(Arc::downgrade(&users));
        context
    }

    /// Returns an identifier that no other transfer of this session has.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Records that a frame of a link waits for others to leave with.
    pub(super) fn note_patient(&self, link: Weak<dyn Link>) {
        // The frame is supervised from now on, as if it had been sent.
        self.control.stay_awake();
        let mut patient = self.patient.lock();
        if !patient.iter().any(|known| known.ptr_eq(&link)) {
            patient.push(link);
        }
        self.has_patient.store(true, Ordering::Release);
    }

    /// Sends frames that wait for others to leave with. The application's calls do this: it goes on
    /// with something else, or may wait for the peer's answer.
    pub(crate) fn hurry(&self) {
        if !self.has_patient.load(Ordering::Relaxed) {
            return;
        }
        // Not those that other threads add meanwhile: a poll is short.
        let known = self.patient.lock().len();
        for _ in 0..known {
            let mut patient = self.patient.lock();
            let link = patient.pop();
            let is_any_left = !patient.is_empty();
            self.has_patient.store(is_any_left, Ordering::Release);
            drop(patient);
            if let Some(link) = link.and_then(|link| link.upgrade()) {
                link.hurry();
            }
        }
    }

    /// Returns the links that may touch memory.
    pub(crate) fn links(&self) -> Vec<Arc<dyn Link>> {
        self.links.lock().clone()
    }

    pub(super) fn add_link(&self, link: Arc<dyn Link>) {
        self.links.lock().push(link);
    }

    pub(super) fn remove_link(&self, link: &Arc<dyn Link>) {
        self.links.lock().retain(|known| !is_same_link(known, link));
    }

    /// Returns when local memory is no longer used on behalf of `run`, which is being aborted.
    pub(crate) fn let_go(&self, run: &Arc<Run>) {
        for link in self.links() {
            link.let_go(run);
        }
        self.copies.quiesce();
    }
}

impl Context {
    /// Adds grants to a neighbour: revocations consider them from here on.
    pub(crate) fn add_grants(&self, grants: &Arc<Grants>) {
        self.forget_grants();
        self.grants.lock().push(Arc::clone(grants));
    }

    /// Removes grants of neighbours that no longer touch memory.
    pub(crate) fn forget_grants(&self) {
        self.grants.lock().retain(|known| !known.is_over());
    }

    /// Waits until no neighbour touches memory of this session, after all connections have ended.
    pub(crate) fn wait_for_neighbours(&self) {
        for grants in std::mem::take(&mut *self.grants.lock()) {
            grants.wait();
        }
    }

    fn grants(&self) -> Vec<Arc<Grants>> {
        self.grants.lock().clone()
    }
}

impl Users for Context {
    fn revoke(&self) {
        self.copies.quiesce();
        for grants in self.grants() {
            grants.revoke();
        }
        self.forget_grants();
        for link in self.links() {
            link.revoke();
        }
    }
}

/// Copies from or to a session's memory that no lane's locks protect.
pub(crate) struct Copies {
    /// Held shared while memory is copied: taking it exclusively waits for all copies to end.
    copying: RwLock<()>,
}

impl Copies {
    /// Makes a copy. `copy` must check whether the memory is live: a revocation waits for the copy.
    pub(crate) fn guarded<T>(&self, copy: impl FnOnce() -> T) -> T {
        let _copying = self.copying.read();
        copy()
    }

    /// Waits until no copy is in flight; later copies see what was revoked or aborted.
    pub(crate) fn quiesce(&self) {
        drop(self.copying.write());
    }

    /// Prevents copies, as a revocation does, until the returned guard is dropped.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> crate::sync::RwLockWriteGuard<'_, ()> {
        self.copying.write()
    }
}
