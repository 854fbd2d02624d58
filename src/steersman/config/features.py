"""Feature gates of Kubernetes v1.36, and those of earlier releases.

Most of them control other components; they are accepted because clusters often share one list of
gates among all components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple


class Gate(NamedTuple):
    """A feature gate of v1.36."""

    stage: str
    """ALPHA, BETA or GA."""
    default: bool


def _gates(stage: str, default: bool, names: str) -> dict[str, Gate]:
    return dict.fromkeys(names.split(), Gate(stage, default))


GATES: Final[Mapping[str, Gate]] = {
    **_gates(
        "GA",
        True,
        """
    AllowServiceExternalIPs MultiCIDRServiceAllocator NFTablesProxyMode
    """,
    ),
    **_gates(
        "BETA",
        True,
        """
    APIResponseCompression APIServerIdentity AllowParsingUserUIDFromCertAuth AtomicFIFO
    AuthorizePodWebsocketUpgradeCreatePermission CPUManagerPolicyBetaOptions
    CRDObservedGenerationTracking ClearingNominatedNodeNameAfterBinding ClientsAllowCARotation
    ClientsAllowTLSCacheGC ComponentFlagz ComponentStatusz ConstrainedImpersonation
    ContainerCheckpoint ContainerRestartRules ContextualLogging DRAConsumableCapacity
    DRADeviceBindingConditions DRADeviceTaints DRAExtendedResource DRAPartitionableDevices
    DRAResourceClaimDeviceStatus DRAResourceClaimGranularStatusAuthorization
    DRASchedulerFilterTimeout DeclarativeValidationBeta DeploymentReplicaSetTerminatingReplicas
    DetectCacheInconsistency EnvFiles ExtendWebSocketsToKubelet GracefulNodeShutdown
    GracefulNodeShutdownBasedOnPodPriority HPAConfigurableTolerance HostnameOverride
    InOrderInformersBatchProcess InPlacePodLevelResourcesVerticalScaling
    InPlacePodVerticalScalingInitContainers KubeletCrashLoopBackOffMax
    KubeletEnsureSecretPulledImages KubeletSeparateDiskGC
    KubeletServiceAccountTokenForCredentialProviders ListFromCacheSnapshot LoggingBetaOptions
    MatchLabelKeysInPodTopologySpread MatchLabelKeysInPodTopologySpreadSelectorMerge
    MutablePodResourcesForSuspendedJobs MutableSchedulingDirectivesForSuspendedJobs
    NodeDeclaredFeatures NominatedNodeNameForExpectation OpenAPIEnums OpportunisticBatching
    PLEGOnDemandRelist PodDeletionCost PodLevelResources PodReadyToStartContainersCondition
    PodTopologyLabelsAdmission PortForwardWebsockets PreventStaticPodAPIReferences
    RelaxedServiceNameValidation ReloadKubeletClientCAFile ReloadKubeletServerCertificateFile
    RemoteRequestHeaderUID ResourceHealthStatus ResourceHealthStatusMessage
    RestartAllContainersOnContainerExits RotateKubeletServerCertificate SchedulerAsyncPreemption
    SchedulerPopFromBackoffQ ServiceAccountNodeAudienceRestriction SizeBasedListCostEstimate
    StaleControllerConsistencyDaemonSet StaleControllerConsistencyJob
    StaleControllerConsistencyReplicaSet StaleControllerConsistencyStatefulSet
    StatefulSetSemanticRevisionComparison StorageVersionHash StrictIPCIDRValidation
    StructuredAuthenticationConfigurationEgressSelector
    StructuredAuthenticationConfigurationJWKSMetrics TokenRequestServiceAccountUIDValidation
    TopologyManagerPolicyBetaOptions TranslateStreamCloseWebsocketRequests
    UnauthenticatedHTTP2DOSMitigation UnknownVersionInteroperabilityProxy
    UnlockWhileProcessingFIFO WatchCacheInitializationPostStartHook WatchList WatchListClient
    WindowsGracefulNodeShutdown
    """,
    ),
    **_gates(
        "ALPHA",
        False,
        """
    APIServingWithRoutine AllAlpha AllowUnsafeMalformedObjectDeletion CBORServingAndStorage
    CPUManagerPolicyAlphaOptions CRIListStreaming CSIVolumeHealth ClientsAllowCBOR
    ClientsPreferCBOR CloudControllerManagerWatchBasedRoutesReconciliation
    CloudControllerManagerWebhook ContainerStopSignals
    ControllerManagerReleaseLeaderElectionLockOnExit CrossNamespaceVolumeDataSource
    DRAListTypeAttributes DRANodeAllocatableResources DRAResourcePoolStatus
    DRAWorkloadResourceClaims EventedPLEG GangScheduling GenericWorkload HPAScaleToZero
    ImageVolumeWithDigest InPlacePodVerticalScalingExclusiveCPUs
    InPlacePodVerticalScalingExclusiveMemory KubeletInUserNamespace LoggingAlphaOptions
    ManifestBasedAdmissionControlConfig MemoryQoS MinimumKubeletVersion MutablePVNodeAffinity
    NativeHistograms PersistentVolumeClaimUnusedSinceTime PodAndContainerStatsFromCRI
    PodLevelResourceManagers PodLogsQuerySplitStreams PodsAPI QOSReserved
    ReduceDefaultCrashLoopBackOffDecay RouteExternalCertificate RuntimeClassInImageCriApi
    ShardedListAndWatch StorageCapacityScoring StoragePerformantSecurityPolicy StorageVersionAPI
    TaintTolerationComparisonOperators TopologyAwareWorkloadScheduling
    TopologyManagerPolicyAlphaOptions UserNamespacesHostNetworkSupport VolumeLimitScaling
    WindowsCPUAndMemoryAffinity WorkloadAwarePreemption WorkloadWithJob
    """,
    ),
    **_gates(
        "BETA",
        False,
        """
    AllBeta ClusterTrustBundle ClusterTrustBundleProjection ConcurrentWatchObjectDecode
    CoordinatedLeaderElection DRADeviceTaintRules LocalStorageCapacityIsolationFSQuotaMonitoring
    MaxUnavailableStatefulSet PodCertificateRequest SELinuxMount SchedulerAsyncAPICalls
    StorageVersionMigrator
    """,
    ),
}
"""Every gate that upstream's kube-proxy v1.36 lists, and those of ours that are stable there."""

RETIRED: Final = frozenset(
    """
    APIListChunking APIPriorityAndFairness APISelfSubjectReview APIServerTracing Accelerators
    AdmissionWebhookMatchConditions AdvancedAuditing AffinityInAnnotations
    AggregatedDiscoveryEndpoint AggregatedDiscoveryRemoveBetaType AllowDNSOnlyNodeCSR
    AllowExtTrafficLocalEndpoints AllowInsecureBackendProxy
    AllowInsecureKubeletCertificateSigningRequests AllowOverwriteTerminationGracePeriodSeconds
    AllowServiceLBStatusOnNonLB AnonymousAuthConfigurableEndpoints AnyVolumeDataSource AppArmor
    AppArmorFields AttachVolumeLimit AuthorizeNodeWithSelectors AuthorizeWithSelectors
    BalanceAttachedNodeVolumes BlockVolume BoundServiceAccountTokenVolume BtreeWatchCache
    CPUManager CPUManagerPolicyOptions CRDValidationRatcheting CRIContainerLogRotation
    CSIBlockVolume CSIDriverRegistry CSIInlineVolume CSIMigration CSIMigrationAWS
    CSIMigrationAWSComplete CSIMigrationAzureDisk CSIMigrationAzureDiskComplete
    CSIMigrationAzureFile CSIMigrationAzureFileComplete CSIMigrationGCE CSIMigrationGCEComplete
    CSIMigrationOpenStack CSIMigrationOpenStackComplete CSIMigrationPortworx CSIMigrationRBD
    CSIMigrationvSphere CSIMigrationvSphereComplete CSINodeExpandSecret CSINodeInfo
    CSIPersistentVolume CSIServiceAccountToken CSIServiceAccountTokenSecrets CSIStorageCapacity
    CSIVolumeFSGroupPolicy CSRDuration CloudDualStackNodeIPs ComponentSLIs
    ConfigurableFSGroupPolicy ConsistentHTTPGetHandlers ConsistentListFromCache
    ContainerCheckpointRestore ControllerManagerLeaderMigration CronJobControllerV2
    CronJobTimeZone CronJobsScheduledAnnotation CrossNamespaceSourceProvisioning
    CustomCPUCFSQuotaPeriod CustomPodDNS CustomResourceDefaulting CustomResourceFieldSelectors
    CustomResourcePublishOpenAPI CustomResourceSubresources CustomResourceValidation
    CustomResourceValidationExpressions CustomResourceWebhookConversion DRAAdminAccess
    DRAPrioritizedList DaemonSetUpdateSurge DebugContainers
    DefaultHostNetworkHostPortsInPodTemplates DefaultPodTopologySpread DelegateFSGroupToCSIDriver
    DevicePluginCDIDevices DevicePlugins DisableAcceleratorUsageMetrics DisableAllocatorDualWrite
    DisableCloudProviders DisableKubeletCloudCredentialProviders DisableNodeKubeProxyVersion
    DownwardAPIHugePages DryRun DynamicAuditing DynamicKubeletConfig DynamicProvisioningScheduling
    DynamicResourceAllocation DynamicVolumeProvisioning EfficientWatchResumption ElasticIndexedJob
    EnableAggregatedDiscoveryTimeout EnableEquivalenceClassCache EndpointSlice
    EndpointSliceNodeName EndpointSliceProxying EndpointSliceTerminatingCondition
    EphemeralContainers EvenPodsSpread ExecProbeTimeout ExpandCSIVolumes
    ExpandInUsePersistentVolumes ExpandPersistentVolumes ExpandedDNSConfig
    ExperimentalCriticalPodAnnotation ExperimentalHostUserNamespaceDefaulting
    ExternalPolicyForExternalIP ExternalServiceAccountTokenSigner GCERegionalPersistentDisk
    GRPCContainerProbe GenericEphemeralVolume HPAContainerMetrics HonorPVReclaimPolicy
    HugePageStorageMediumSize HugePages HyperVContainer IPTablesOwnershipCleanup IPv6DualStack
    IdentifyPodOS ImageMaximumGCAge ImageVolume ImmutableEphemeralVolumes
    InPlacePodVerticalScaling InPlacePodVerticalScalingAllocatedStatus InTreePluginAWSUnregister
    InTreePluginAzureDiskUnregister InTreePluginAzureFileUnregister InTreePluginGCEUnregister
    InTreePluginOpenStackUnregister InTreePluginPortworxUnregister InTreePluginRBDUnregister
    InTreePluginvSphereUnregister IndexedJob InformerResourceVersion IngressClassNamespacedParams
    Initializers JobBackoffLimitPerIndex JobManagedBy JobMutableNodeSchedulingDirectives
    JobPodFailurePolicy JobPodReplacementPolicy JobReadyPods JobSuccessPolicy
    JobTrackingWithFinalizers KMSv1 KMSv2 KMSv2KDF KubeProxyDrainingTerminatingNodes
    KubeletCgroupDriverFromCRI KubeletConfigFile KubeletCredentialProviders KubeletPSI
    KubeletPluginsWatcher KubeletPodResources KubeletPodResourcesDynamicResources
    KubeletPodResourcesGet KubeletPodResourcesGetAllocatable KubeletPodResourcesListUseActivePods
    KubeletRegistrationGetOnExistsOnly KubeletServiceAccountTokenForCredentialProvider
    KubeletTracing LegacyNodeRoleBehavior LegacyServiceAccountTokenCleanUp
    LegacyServiceAccountTokenNoAutoGeneration LegacyServiceAccountTokenTracking
    LegacySidecarContainers LoadBalancerIPMode LocalStorageCapacityIsolation LogarithmicScaleDown
    MatchLabelKeysInPodAffinity MemoryManager MinDomainsInPodTopologySpread
    MinimizeIPTablesRestore MixedProtocolLBService MountContainers MountPropagation
    MultiCIDRRangeAllocator MutatingAdmissionPolicy NamespaceDefaultLabelName NetworkPolicyEndPort
    NetworkPolicyStatus NewVolumeManagerReconstruction NodeDisruptionExclusion
    NodeInclusionPolicyInPodTopologySpread NodeLease NodeLogQuery NodeOutOfServiceVolumeDetach
    NodeSwap NonPreemptingPriority OpenAPIV3 OrderedNamespaceDeletion
    PDBUnhealthyPodEvictionPolicy PVCProtection PersistentLocalVolumes
    PersistentVolumeLastPhaseTransitionTime PodAffinityNamespaceSelector PodDisruptionBudget
    PodDisruptionConditions PodHasNetworkCondition PodHostIPs PodIndexLabel
    PodLifecycleSleepAction PodLifecycleSleepActionAllowZero PodObservedGenerationTracking
    PodOverhead PodPriority PodReadinessGates PodSchedulingReadiness PodSecurity
    PodShareProcessNamespace PreferNominatedNode PreferSameTrafficDistribution
    ProbeHostPodSecurityStandards ProbeTerminationGracePeriod ProcMountType
    ProxyTerminatingEndpoints QueueingHint ReadWriteOncePod RecoverVolumeExpansionFailure
    RecursiveReadOnlyMounts RelaxedDNSSearchValidation RelaxedEnvironmentVariableValidation
    ReliableStatefulSetNameResolution RemainingItemCount RemoveSelfLink RequestManagement
    ResilientWatchCacheInitialization ResourceLimitsPriorityFunction ResourceQuotaScopeSelectors
    RetroactiveDefaultStorageClass RetryGenerateName RootCAConfigMap
    RotateKubeletClientCertificate RunAsGroup RuntimeClass SCTPSupport SELinuxChangePolicy
    SELinuxMountReadWriteOncePod ScheduleDaemonSetPods SchedulerPreemption SchedulerQueueingHints
    SeccompDefault SecurityContextDeny SelectorIndex SeparateCacheWatchRPC
    SeparateTaintEvictionController ServerSideApply ServerSideFieldValidation
    ServiceAccountIssuerDiscovery ServiceAccountTokenJTI ServiceAccountTokenNodeBinding
    ServiceAccountTokenNodeBindingValidation ServiceAccountTokenPodNodeInfo ServiceAppProtocol
    ServiceIPStaticSubrange ServiceInternalTrafficPolicy ServiceLBNodePortControl
    ServiceLoadBalancerClass ServiceLoadBalancerFinalizer ServiceNodeExclusion
    ServiceNodePortStaticSubrange ServiceTopology ServiceTrafficDistribution SetHostnameAsFQDN
    SidecarContainers SizeMemoryBackedVolumes SkipReadOnlyValidationGCE StableLoadBalancerNodeSet
    StartupProbe StatefulSetAutoDeletePVC StatefulSetMinReadySeconds StatefulSetStartOrdinal
    StorageNamespaceIndex StorageObjectInUseProtection StreamingCollectionEncodingToJSON
    StreamingCollectionEncodingToProtobuf StreamingProxyRedirects StrictCostEnforcementForVAP
    StrictCostEnforcementForWebhooks StructuredAuthenticationConfiguration
    StructuredAuthorizationConfiguration SupplementalGroupsPolicy SupportIPVSProxyMode
    SupportNodePidsLimit SupportPodPidsLimit SuspendJob Sysctls SystemdWatchdog TTLAfterFinished
    TaintBasedEvictions TaintNodesByCondition TokenRequest TokenRequestProjection
    TopologyAwareHints TopologyManager TopologyManagerPolicyOptions
    UserNamespacesPodSecurityStandards UserNamespacesStatelessPodsSupport UserNamespacesSupport
    ValidateProxyRedirects ValidatingAdmissionPolicy VolumeAttributesClass VolumeCapacityPriority
    VolumePVCDataSource VolumeScheduling VolumeSnapshotDataSource VolumeSubpath
    VolumeSubpathEnvExpansion WarningHeaders WatchBookmark WatchFromStorageWithoutResourceVersion
    WatchListClientFallback WinDSR WinOverlay WindowsEndpointSliceProxying WindowsGMSA
    WindowsHostNetwork WindowsHostProcessContainers WindowsRunAsUserName
    ZeroLimitedNominalConcurrencyShares
    """.split()  # noqa: SIM905 - a list of 329 lines
)
"""Gates of earlier releases whose feature is always on, or gone, by v1.36."""


def enabled(gates: Mapping[str, bool], name: str) -> bool:
    """Return whether a feature is on: by its gate, by AllAlpha or AllBeta, or by default."""
    if name in gates:
        return gates[name]
    gate = GATES[name]
    return gates.get({"ALPHA": "AllAlpha", "BETA": "AllBeta"}.get(gate.stage, ""), gate.default)


def unknown(gates: Mapping[str, bool]) -> Iterator[str]:
    """Return the gates that no release of Kubernetes had, sorted."""
    return (name for name in sorted(gates) if name not in GATES and name not in RETIRED)


def gate_warnings(gates: Mapping[str, bool]) -> Iterator[str]:
    """Yield a sentence for each gate without effect, sorted."""
    for name in sorted(gates):
        if name in RETIRED:
            yield f"feature gate {name} is retired and has no effect; remove it"


def suggest(word: str, choices: Mapping[str, object]) -> str:
    """Return ` (did you mean X?)` if a choice is close to the word, else ""."""
    import difflib  # noqa: PLC0415 - 150 kB, for mistakes only

    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
